/* transfer_tensor.h: results of a CUDA device on their way to the host, for processes that are not Rust.
 *
 *     uint64_t pool;
 *     tt_options options = { .device = 0, .capacity = 4, .room_timeout_ms = TT_FOREVER };
 *     if (tt_egress_create(&options, &pool) != TT_OK) die(tt_egress_last_error());
 *
 *     // The producer, after each kernel launch on `stream`:
 *     tt_egress_submit(pool, data, bytes, (uint64_t)(uintptr_t)stream, step, give_back, data_owner);
 *
 *     // A consumer, on a thread of its own:
 *     tt_output output;
 *     while (tt_egress_next(pool, TT_FOREVER, &output) == TT_OK) {
 *         if (output.output != 0) {
 *             write(file, output.data, output.bytes);
 *             tt_egress_release(output.output);
 *         }
 *     }
 *
 *     // In the end:
 *     tt_egress_shutdown(pool, 60000, NULL);   // `next` gives what is left, then TT_END
 *     // join the consumers, then
 *     tt_egress_destroy(pool, 60000);
 *
 * Calls.  Every function but tt_egress_abi and tt_egress_last_error returns a tt_code. All may be called from any
 * thread, at the same time too. Pools and outputs are numbers that are never used twice, 0 is none: one that is gone is
 * TT_INVALID, and harmless. A call leaves the thread's current CUDA context as it was.
 *
 * Ordering.  The copy comes after all that the stream of tt_egress_submit was given before that call. It runs on a
 * stream of the library's own, so that theirs goes on meanwhile.
 *
 * Memory.  What was submitted must stay valid, and must not be written, until its release callback was called: then the
 * copy has passed. For each submit that returned TT_OK the callback is called exactly once, also when the copy fails,
 * when the pool is shut down, and after a fault of the device (then by tt_egress_destroy at the latest). For one that
 * returned anything else it is never called; the memory is the caller's again at once, but for TT_IN_USE.
 *
 * Callback.  It runs on a thread of the library that others wait for: it must be quick, must not wait, must not call
 * into this library, and must not throw or jump out. It may also run inside tt_egress_submit, where the device was done
 * before that returned; and after a fault inside tt_egress_next, tt_egress_shutdown and tt_egress_destroy.
 *
 * Forks.  In a child of a process that has used the library every call returns TT_FORKED at once.
 */
#ifndef TRANSFER_TENSOR_H
#define TRANSFER_TENSOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What tt_egress_abi returns for this header. It changes when a struct or a function does. */
#define TT_EGRESS_ABI 1u

/* A time-out that is never over. */
#define TT_FOREVER UINT32_MAX

typedef enum tt_code {
    TT_OK = 0,
    TT_TIMEOUT = 1,        /* not in time; the call may be made again */
    TT_END = 2,            /* tt_egress_next: the pool was shut down, and all was given */
    TT_INVALID = 3,        /* an argument: null, or no such pool, output or stream */
    TT_NO_DEVICE = 4,      /* no usable driver, or no such device */
    TT_CLOSED = 5,         /* the pool takes nothing any more; an item was not delivered before its end */
    TT_FULL = 6,           /* no room in time */
    TT_TOO_LARGE = 7,      /* the item is larger than all room */
    TT_CAPTURING = 8,      /* the stream is being captured into a graph, which goes on unharmed */
    TT_FAULT = 9,          /* the device faulted; its context is lost */
    TT_OUT_OF_MEMORY = 10, /* the host or the device has no memory for it */
    TT_INTERNAL = 11,      /* a defect of the library */
    TT_OTHER = 12,         /* tt_egress_last_error says what */
    TT_FORKED = 13,        /* this is a forked child of a process that used the library before */
    TT_IN_USE = 14         /* tt_egress_submit: refused, but the device may be at the memory, which must stay as it is */
} tt_code;

/* tt_options.order: as copies end, or as they were submitted. */
#define TT_ORDER_COMPLETION 0u
#define TT_ORDER_SUBMISSION 1u

/* What a pool is to be. All zeroes is a pool for device 0 that never waits for room. */
typedef struct tt_options {
    uint32_t device;          /* number of the device, as CUDA counts; its primary context is used */
    uint32_t workers;         /* threads that put results into the queue; 0: the thread that sees copies end does it */
    uint32_t capacity;        /* how many items at a time, under way or not yet released; 0: 64 */
    uint32_t order;           /* TT_ORDER_COMPLETION or TT_ORDER_SUBMISSION */
    uint64_t budget;          /* how many bytes these may have together; 0: half of what the host can allocate */
    uint32_t room_timeout_ms; /* how long tt_egress_submit waits for room; 0: not at all; or TT_FOREVER */
    uint32_t reserved;        /* 0 */
} tt_options;

/* What became of one item. */
typedef struct tt_output {
    uint64_t output;     /* for tt_egress_release; 0: the item failed, and there is nothing to release */
    const uint8_t *data; /* its bytes on the host, page-locked; null, if it failed */
    uint64_t bytes;
    uint64_t tag;        /* as submitted */
    int32_t error;       /* TT_OK, or why it failed; tt_egress_last_error has the text */
    int32_t reserved;
} tt_output;

/* What became of the items that were open when tt_egress_shutdown began. */
typedef struct tt_shutdown {
    uint64_t delivered; /* to the queue of tt_egress_next */
    uint64_t failed;
    uint64_t abandoned; /* not in time */
} tt_shutdown;

/* Numbers of a pool since it was made. */
typedef struct tt_stats {
    uint64_t submitted;  /* items taken */
    uint64_t in_flight;  /* items whose copy has not run */
    uint64_t delivered;  /* items that were delivered to the queue of tt_egress_next */
    uint64_t failed;     /* items that ended with an error */
    uint64_t bytes;      /* that came to the host */
    uint64_t kept;       /* items that take room: under way, in the queue, or not yet released */
    uint64_t kept_bytes; /* and their bytes */
    uint64_t copying_ns; /* how long all items together took from tt_egress_submit to the host */
    uint64_t lent;       /* submits whose callback is yet to be called */
    uint64_t released;   /* callbacks that were called */
    uint32_t faulted;    /* 1: the device faulted, nothing comes any more */
    uint32_t closed;     /* 1: nothing is taken any more */
} tt_stats;

/* See "Memory" above. */
typedef void (*tt_release)(void *user);

/* The version of the library's interface. Check it against TT_EGRESS_ABI. */
uint32_t tt_egress_abi(void);

/* What went wrong in this thread's last call that returned an error, or in the failed item that tt_egress_next gave it
 * last. Never null; valid until this thread's next call. */
const char *tt_egress_last_error(void);

/* Makes a pool, and writes its number to `pool`. */
int32_t tt_egress_create(const tt_options *options, uint64_t *pool);

/* Hands over `bytes` bytes of the device at `data`, with a tag of the caller's. `stream` is 0 or 1 (the legacy default
 * stream), 2 (the calling thread's default stream) or a CUstream/cudaStream_t of the device's primary context; what is
 * none of these is undefined. `release` may be null. Waits for room, no longer than the pool's room_timeout_ms; not
 * for the device, but where the driver refuses in the midst of a copy.
 * TT_FULL, TT_TOO_LARGE, TT_CLOSED, TT_CAPTURING, TT_FAULT, ...: nothing was taken. */
int32_t tt_egress_submit(uint64_t pool, uint64_t data, uint64_t bytes, uint64_t stream, uint64_t tag,
                         tt_release release, void *user);

/* Waits for the next item. Each is given once, to one of those who wait; TT_OK also for one that failed: look at
 * output->error.
 * TT_TIMEOUT: none in time. TT_END: there will be none. */
int32_t tt_egress_next(uint64_t pool, uint32_t timeout_ms, tt_output *output);

/* Gives the memory of an output back, and its room. An output may outlive its pool. */
int32_t tt_egress_release(uint64_t output);

/* Waits until all that was submitted is in the queue, or was given. */
int32_t tt_egress_drain(uint64_t pool, uint32_t timeout_ms);

/* Takes nothing any more, and waits for what is open. What is not delivered in time fails with TT_CLOSED, and this
 * returns TT_TIMEOUT; its memory comes back all the same, when the device is done with it. `report` may be null. */
int32_t tt_egress_shutdown(uint64_t pool, uint32_t timeout_ms, tt_shutdown *report);

int32_t tt_egress_stats(uint64_t pool, tt_stats *stats);

/* Shuts the pool down, waits until the device is done with all that was submitted, calls what callbacks are left, and
 * forgets the pool with what is in its queue. TT_TIMEOUT: not in time; it is shut down, and may be destroyed again. A
 * process that ends without it loses what is open. */
int32_t tt_egress_destroy(uint64_t pool, uint32_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
