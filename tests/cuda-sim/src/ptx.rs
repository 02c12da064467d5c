//! The entry points of a PTX module and the sizes of their parameters.
//!
//! Bodies are not read: what runs is the function registered under the entry's name. The sizes
//! are needed because a launch passes pointers to the arguments, and says nothing of their length.

/// One `.entry` of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name a module's function is looked up by.
    pub name: String,
    /// Each parameter's size in bytes, in order.
    pub params: Vec<usize>,
}

/// Larger than any parameter block the hardware takes.
const LARGEST_PARAM: usize = 32_764;

/// Reads the entry points of a module.
///
/// # Errors
/// The text is no PTX (it needs `.version` and `.target`), or an entry's parameter list cannot
/// be read; the text says which.
pub fn parse(ptx: &str) -> Result<Vec<Entry>, String> {
    let text = without_comments(ptx.trim_end_matches('\0'));
    let tokens = tokens(&text);
    for directive in [".version", ".target"] {
        if !tokens.contains(&directive) {
            return Err(format!("no {directive} directive: not a PTX module"));
        }
    }
    let mut entries: Vec<Entry> = Vec::new();
    let mut rest = tokens.as_slice();
    while let Some(at) = rest.iter().position(|token| *token == ".entry") {
        rest = &rest[at + 1..];
        let entry = read_entry(&mut rest)?;
        // A forward declaration comes before the definition of the same name.
        if entries.iter().all(|known| known.name != entry.name) {
            entries.push(entry);
        }
    }
    Ok(entries)
}

/// Comments become spaces; strings (in `.file` and `.pragma`) are kept whole.
fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['/', '"']) {
        kept.push_str(&rest[..at]);
        rest = &rest[at..];
        let taken = if let Some(body) = rest.strip_prefix("//") {
            kept.push(' ');
            2 + body.find('\n').unwrap_or(body.len())
        } else if let Some(body) = rest.strip_prefix("/*") {
            kept.push(' ');
            2 + body.find("*/").map_or(body.len(), |end| end + 2)
        } else if let Some(body) = rest.strip_prefix('"') {
            kept.push_str("\"\"");
            1 + body.find('"').map_or(body.len(), |end| end + 1)
        } else {
            kept.push('/');
            1
        };
        rest = &rest[taken..];
    }
    kept.push_str(rest);
    kept
}

/// Words, and each mark of `()[]{},;` as a token of its own.
fn tokens(text: &str) -> Vec<&str> {
    const MARKS: [char; 8] = ['(', ')', '[', ']', '{', '}', ',', ';'];
    let mut found = Vec::new();
    for word in text.split_whitespace() {
        let mut rest = word;
        while let Some(at) = rest.find(MARKS) {
            if at > 0 {
                found.push(&rest[..at]);
            }
            found.push(&rest[at..=at]);
            rest = &rest[at + 1..];
        }
        if !rest.is_empty() {
            found.push(rest);
        }
    }
    found
}

/// After `.entry`: a name and, in parentheses, the parameters.
fn read_entry(rest: &mut &[&str]) -> Result<Entry, String> {
    let name = match rest.split_first() {
        Some((name, tail)) if is_name(name) => {
            *rest = tail;
            (*name).to_owned()
        }
        _ => return Err("an .entry without a name".to_owned()),
    };
    let mut params = Vec::new();
    if rest.first() != Some(&"(") {
        return Ok(Entry { name, params });
    }
    let end = rest.iter().position(|token| *token == ")");
    let Some(end) = end else {
        return Err(format!("entry {name}: its parameter list does not end"));
    };
    let list = &rest[1..end];
    *rest = &rest[end + 1..];
    if !list.is_empty() {
        for (index, param) in list.split(|token| *token == ",").enumerate() {
            let size = param_size(param)
                .ok_or_else(|| format!("entry {name}: cannot size parameter {index}: {}", param.join(" ")))?;
            params.push(size);
        }
    }
    Ok(Entry { name, params })
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_alphabetic() || "_$%".contains(c))
}

/// `.param .u64 .ptr .global .align 8 name` or `.param .align 8 .b8 name[24]`.
fn param_size(tokens: &[&str]) -> Option<usize> {
    if tokens.first() != Some(&".param") {
        return None;
    }
    let element = tokens.iter().find_map(|token| type_size(token))?;
    let count = match tokens.iter().position(|token| *token == "[") {
        None => 1,
        Some(at) => tokens.get(at + 1)?.parse::<usize>().ok()?,
    };
    element.checked_mul(count).filter(|size| *size <= LARGEST_PARAM)
}

fn type_size(token: &str) -> Option<usize> {
    Some(match token {
        ".u8" | ".s8" | ".b8" => 1,
        ".u16" | ".s16" | ".b16" | ".f16" | ".bf16" => 2,
        ".u32" | ".s32" | ".b32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".u64" | ".s64" | ".b64" | ".f64" | ".texref" | ".samplerref" | ".surfref" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 7.0\n.target sm_70\n.address_size 64\n";

    fn parse_with_head(body: &str) -> Result<Vec<Entry>, String> {
        parse(&format!("{HEAD}{body}"))
    }

    #[test]
    fn entries_and_sizes() {
        let entries = parse_with_head(
            ".visible .entry _Z3addPfS_m( // a comment, with ( and .entry in it\n\
             .param .u64 .ptr .global .align 4 a,\n .param .u32 /* , */ n,\n\
             .param .align 8 .b8 s[24]\n)\n.maxntid 128, 1, 1 { ret; }\n\
             .func (.param .b32 r) helper(.param .b64 x) { ret; }\n\
             .weak .entry none() { ret; }\n.entry bare { ret; }",
        )
        .unwrap();
        let found: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.params.as_slice())).collect();
        assert_eq!(found, [("_Z3addPfS_m", [8, 4, 24].as_slice()), ("none", &[]), ("bare", &[])]);
    }

    #[test]
    fn a_declaration_before_its_definition_counts_once() {
        let text = ".extern .entry k(.param .u8 x);\n.entry k(.param .u8 x) { ret; }\0";
        assert_eq!(parse_with_head(text).unwrap().len(), 1);
    }

    #[test]
    fn what_is_no_ptx_is_refused() {
        for text in ["", "\0", "hello", "\u{7f}ELF\u{0}", ".version 7.0", "// .version .target"] {
            assert!(parse(text).unwrap_err().contains("not a PTX module"), "{text:?}");
        }
        for (body, says) in [
            (".entry", "without a name"),
            (".entry (", "without a name"),
            (".entry k(.param .u64 x", "does not end"),
            (".entry k(.param .u64 x,)", "parameter 1"),
            (".entry k(.param .q7 x)", "parameter 0"),
            (".entry k(.param .b8 x[-1])", "parameter 0"),
            (".entry k(.param .b8 x[99999999999999999999])", "parameter 0"),
            (".entry k(.param .b64 x[18446744073709551615])", "parameter 0"),
        ] {
            let error = parse_with_head(body).unwrap_err();
            assert!(error.contains(says), "{body}: {error}");
        }
        parse_with_head("/* never ends .entry k(").unwrap();
        parse_with_head(".file 1 \"a // b .entry\n").unwrap();
    }
}
