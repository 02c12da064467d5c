//! Stream capture and graphs.

use super::types::{In, Out};
use crate::capture::{self, Graph};
use crate::state;
use crate::status::{INVALID_HANDLE, INVALID_VALUE, Res};
use std::ffi::c_void;

export! {
    fn cuStreamBeginCapture(call, stream: u64, mode: u32) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            capture::begin(st, stream, mode)
        })
    }

    fn cuStreamBeginCapture_v2(call, stream: u64, mode: u32) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            capture::begin(st, stream, mode)
        })
    }

    fn cuStreamEndCapture(call, stream: u64, graph: Out<u64>) {
        call.stream(stream).ctx(|st, here| {
            graph.set_if(0);
            let stream = st.stream_of(here.ctx, stream)?;
            let made = capture::end(st, stream)?;
            graph.set(made)
        })
    }

    fn cuStreamIsCapturing(call, stream: u64, status: Out<u32>) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            status.set(capture::status(st, stream)?.0)
        })
    }

    fn cuStreamGetCaptureInfo(call, stream: u64, status: Out<u32>, id: Out<u64>) {
        call.stream(stream).ctx(|st, here| info(st, here.ctx, stream, status, id))
    }

    fn cuStreamGetCaptureInfo_v2(
        call, stream: u64, status: Out<u32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>, count: Out<usize>,
    ) {
        call.stream(stream).ctx(|st, here| {
            graph.set_if(0);
            dependencies.set_if(0);
            count.set_if(0);
            info(st, here.ctx, stream, status, id)
        })
    }

    fn cuStreamGetCaptureInfo_v3(
        call, stream: u64, status: Out<u32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>, edges: Out<u64>,
        count: Out<usize>,
    ) {
        call.stream(stream).ctx(|st, here| {
            graph.set_if(0);
            dependencies.set_if(0);
            edges.set_if(0);
            count.set_if(0);
            info(st, here.ctx, stream, status, id)
        })
    }

    fn cuThreadExchangeStreamCaptureMode(call, mode: Out<u32>) {
        call.anywhere(|_| {
            let wanted = mode.get()?;
            if wanted > capture::RELAXED {
                return Err(INVALID_VALUE);
            }
            mode.set(state::set_capture_mode(wanted))
        })
    }

    fn cuGraphCreate(call, graph: Out<u64>, _flags: u32) {
        call.ctx(|st, here| {
            let handle = st.handle();
            st.graphs.insert(handle, Graph { ctx: here.ctx, ..Graph::default() });
            graph.set(handle)
        })
    }

    fn cuGraphClone(call, clone: Out<u64>, graph: u64) {
        call.ctx(|st, _| {
            let copy = st.graphs.get(&graph).cloned().ok_or(INVALID_VALUE)?;
            let handle = st.handle();
            st.graphs.insert(handle, copy);
            clone.set(handle)
        })
    }

    fn cuGraphDestroy(call, graph: u64) {
        call.anywhere(|st| st.graphs.remove(&graph).map(|_| ()).ok_or(INVALID_VALUE))
    }

    fn cuGraphGetNodes(call, graph: u64, nodes: Out<u64>, count: Out<usize>) {
        call.ctx(|st, _| {
            let found = st.graphs.get(&graph).ok_or(INVALID_VALUE)?.nodes.len();
            if nodes.check().is_ok() {
                // A node's handle is made of its graph's; handles are 64 apart, and nothing looks one up.
                for index in 0..found.min(count.get()?) {
                    nodes.at(index).set(graph + 1 + index as u64)?;
                }
            }
            count.set(found)
        })
    }

    fn cuGraphInstantiateWithFlags(call, exec: Out<u64>, graph: u64, _flags: u64) {
        call.ctx(|st, _| instantiate(st, exec, graph))
    }

    fn cuGraphInstantiateWithParams(call, exec: Out<u64>, graph: u64, _params: In<c_void>) {
        call.ctx(|st, _| instantiate(st, exec, graph))
    }

    fn cuGraphInstantiate(call, exec: Out<u64>, graph: u64, _flags: u64) {
        call.ctx(|st, _| instantiate(st, exec, graph))
    }

    fn cuGraphInstantiate_v2(call, exec: Out<u64>, graph: u64, _node: Out<u64>, _log: Out<c_void>, _size: usize) {
        call.ctx(|st, _| instantiate(st, exec, graph))
    }

    fn cuGraphExecDestroy(call, exec: u64) {
        call.anywhere(|st| st.execs.remove(&exec).map(|_| ()).ok_or(INVALID_HANDLE))
    }

    fn cuGraphUpload(call, exec: u64, stream: u64) {
        call.stream(stream).ctx(|st, here| {
            st.stream_of(here.ctx, stream)?;
            st.execs.get(&exec).map(|_| ()).ok_or(INVALID_HANDLE)
        })
    }

    fn cuGraphLaunch(call, exec: u64, stream: u64) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            capture::launch(st, exec, stream)
        })
    }
}

fn info(st: &mut state::State, ctx: u64, stream: u64, status: Out<u32>, id: Out<u64>) -> Res {
    let stream = st.stream_of(ctx, stream)?;
    let (state, capture) = capture::status(st, stream)?;
    id.set_if(capture);
    status.set(state)
}

fn instantiate(st: &mut state::State, exec: Out<u64>, graph: u64) -> Res {
    exec.check()?;
    let copy = st.graphs.get(&graph).cloned().ok_or(INVALID_VALUE)?;
    let handle = st.handle();
    st.execs.insert(handle, Graph { last: None, ..copy });
    exec.set(handle)
}
