//! What runs in a child of a fork.

/// Runs `run` in a child of a fork, which ends then, and after five seconds at the latest; the child's status: 0 where `run` said true. What
/// `run` takes out of its places is taken in the child only.
pub(crate) fn in_a_forked_child(run: &mut dyn FnMut() -> bool) -> i32 {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
        fn alarm(seconds: u32) -> u32;
    }
    // SAFETY: the child runs what the test says, and ends.
    match unsafe { fork() } {
        0 => {
            // SAFETY: it ends the child if that hangs.
            unsafe { alarm(5) };
            let code = i32::from(!run());
            // SAFETY: nothing of the child's is needed any more.
            unsafe { _exit(code) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: a child of ours and a place for its status.
            unsafe { waitpid(pid, &raw mut status, 0) };
            status
        }
    }
}
