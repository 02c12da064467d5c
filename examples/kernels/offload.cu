// The kernels of the example `offload`. The simulated driver runs the Rust functions of the same names in
// ../offload/kernel.rs; the two must agree.
//
// offload.ptx is made from this file, with CUDA 13.0's compiler, by
//
//     nvcc --ptx -O3 -arch=compute_75 -o offload.ptx offload.cu
//
// and then its head is lowered to `.version 7.0` / `.target sm_70`: the bodies use nothing newer, and a lower head is
// taken by more drivers and more GPUs.

typedef unsigned int u32;
typedef unsigned long long u64;

// What a layer does to the state: every word of it depends on all the words before and on one word of the weights,
// in this order, so that a layer that was not there, or another one, shows in the result.
extern "C" __global__ void fold(u32 *state, const u32 *weights, u64 n) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        u32 s = state[i];
        state[i] = ((s << 5) | (s >> 27)) * 0x9E3779B1u ^ weights[i];
    }
}

// Takes so many ticks of the multiprocessor's clock and touches no memory. Launch one thread.
extern "C" __global__ void spin(u64 ticks) {
    long long start = clock64();
    while ((u64)(clock64() - start) < ticks) {
    }
}
