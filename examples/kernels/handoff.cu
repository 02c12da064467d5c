// The kernel of the example `handoff`. The simulated driver runs the Rust function of the same name in
// ../handoff/kernel.rs; the two must agree.
//
// handoff.ptx is made from this file, with CUDA 13.0's compiler, by
//
//     nvcc --ptx -O3 -arch=compute_75 -o handoff.ptx handoff.cu
//
// and then its head is lowered to `.version 7.0` / `.target sm_70`: the body uses nothing newer, and a lower head is
// taken by more drivers and more GPUs.

typedef unsigned char u8;
typedef unsigned long long u64;

// A hash of the index: the low byte of splitmix64's mix, made odd. It is never 0, so an XOR with it changes every byte.
static __device__ u8 index_hash(u64 i) {
    u64 z = i + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (u8)(z ^ (z >> 31)) | 1;
}

// p[i] ^= index_hash(i): changes every byte of every element, and undoes itself.
extern "C" __global__ void change_every_byte(u8 *p, u64 n) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) p[i] ^= index_hash(i);
}
