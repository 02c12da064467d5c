"""How the figures are said: as a table, as JSON, as a bar chart in SVG."""

import json
import statistics
from xml.sax.saxutils import escape


def seconds_a_step(times, warmup, steps):
    """The median, over all runs of `span` steps after the warm-up, of what a step took in them; and the mean of all.

    Several workers are done at about the same time, and then none for a while: over as many steps as there may be
    workers that evens out. All variants are measured with the same span.
    """
    counted = sorted(times)[warmup - 1 : warmup + steps]
    span = max(1, min(8, steps * 2 // 3))
    spans = [(end - start) / span for start, end in zip(counted, counted[span:])]
    return statistics.median(spans), (counted[-1] - counted[0]) / steps


def table(rows):
    bound = next((row["seconds"] for row in rows if row["variant"] == "compute" and row["seconds"]), None)
    lines = [f"{'variant':<30} {'consumer':<9} {'s/step':>8} {'steps/s':>8} {'of compute':>11}"]
    for row in rows:
        label = f"{row['label']:<30} {row['consumer']:<9}"
        if row["seconds"] is None:
            lines.append(f"{label} {row['note']}")
            continue
        share = f"{bound / row['seconds']:>11.3f}" if bound else f"{'-':>11}"
        note = f"  {row['note']}" if row["note"] else ""
        lines.append(f"{label} {row['seconds']:>8.4f} {1 / row['seconds']:>8.3f} {share}{note}")
    return "\n".join(lines)


def write_json(path, about, rows):
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**about, "variants": rows}, file, indent=1)
        file.write("\n")


def write_svg(path, title, rows):
    """Steps a second, one bar a variant."""
    measured = [row for row in rows if row["seconds"]]
    most = max((1 / row["seconds"] for row in measured), default=1.0)
    left, width, bar, gap, top = 250, 420, 24, 12, 48
    height = top + len(measured) * (bar + gap) + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{left + width + 90}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="15">{escape(title)}</text>',
    ]
    for at, row in enumerate(measured):
        rate = 1 / row["seconds"]
        y, middle = top + at * (bar + gap), top + at * (bar + gap) + bar * 0.7
        colour = {"compute": "#999999", "ours": "#2a7f4f"}.get(row["variant"], "#4a78b0")
        lines += [
            f'<text x="{left - 10}" y="{middle:.0f}" text-anchor="end">{escape(row["label"])}</text>',
            f'<rect x="{left}" y="{y}" width="{rate / most * width:.1f}" height="{bar}" fill="{colour}"/>',
            f'<text x="{left + rate / most * width + 8:.1f}" y="{middle:.0f}">{rate:.3f}</text>',
        ]
    lines.append("</svg>")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
