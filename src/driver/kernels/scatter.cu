// The kernel of `driver/scatter.rs`. The simulated driver runs the Rust function of the same name in its `kernels/builtin.rs`; the
// two must agree.
//
// scatter.ptx is made from this file, with CUDA 13.0's compiler, by
//
//     nvcc --ptx -O3 -arch=compute_75 -o scatter.ptx scatter.cu
//
// and then its head is lowered to `.version 6.3` / `.target sm_52`: the body uses nothing newer, and a lower head is taken by more
// drivers and more GPUs.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Where a run of packed bytes goes.
struct Place {
    u64 target;
    u32 offset;
    u32 bytes;
};

template <typename T>
static __device__ void copy(u8 *to, const u8 *from, u32 bytes) {
    // Packed bytes that lie as their target does are read and written in words from the first whole one on.
    u32 head = (u32)(-(u64)to) & (u32)(sizeof(T) - 1);
    head = head < bytes ? head : bytes;
    u32 words = (bytes - head) / (u32)sizeof(T);
    u32 tail = head + words * (u32)sizeof(T);
    T *words_to = (T *)(to + head);
    const T *words_from = (const T *)(from + head);
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) words_to[i] = words_from[i];
    for (u32 i = threadIdx.x; i < head; i += blockDim.x) to[i] = from[i];
    for (u32 i = tail + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

// Brings `count` runs of the bytes at `packed` to their places; a block of threads takes one at a time.
extern "C" __global__ void transfer_tensor_scatter(const u8 *packed, const Place *places, u32 count) {
    for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
        Place place = places[i];
        u8 *to = (u8 *)place.target;
        const u8 *from = packed + place.offset;
        u32 apart = (u32)((u64)to ^ (u64)from);
        if (apart & 3) copy<u8>(to, from, place.bytes);
        else if (apart & 15) copy<u32>(to, from, place.bytes);
        else copy<uint4>(to, from, place.bytes);
    }
}
