// The kernels that every test may use, as a real GPU runs them. The simulated driver runs the
// Rust functions of the same names in ../src/kernels/builtin.rs; the two must agree.
//
// kernels.ptx is made from this file, with CUDA 13.0's compiler, by
//
//     nvcc --ptx -O3 -arch=compute_75 -o kernels.ptx kernels.cu
//
// and then its head is lowered to `.version 7.0` / `.target sm_70`: the bodies use nothing newer,
// and a lower head is taken by more drivers and more GPUs.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// The first of a thread's elements, and the distance to its next.
static __device__ u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ u64 stride() { return (u64)gridDim.x * blockDim.x; }

// The low byte of a 64-bit mix (splitmix64's) of the index.
static __device__ u8 index_hash(u64 i) {
    u64 z = i + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (u8)(z ^ (z >> 31));
}

// p[i] ^= index_hash(i): changes every byte but where the hash is 0, and undoes itself.
extern "C" __global__ void xor_index_u8(u8 *p, u64 n) {
    for (u64 i = first(); i < n; i += stride()) p[i] ^= index_hash(i);
}

// p[i] = the low byte of value.
extern "C" __global__ void fill_u8(u8 *p, u64 n, u32 value) {
    for (u64 i = first(); i < n; i += stride()) p[i] = (u8)value;
}

// dst[i] = src[i]; the two must not overlap.
extern "C" __global__ void copy_u8(u8 *dst, const u8 *src, u64 n) {
    for (u64 i = first(); i < n; i += stride()) dst[i] = src[i];
}

// p[i] += 1.
extern "C" __global__ void add_one_f32(float *p, u64 n) {
    for (u64 i = first(); i < n; i += stride()) p[i] += 1.0f;
}

// A gate: runs until *flag == value. Launch one thread.
extern "C" __global__ void spin_until(const volatile u32 *flag, u32 value) {
    while (*flag != value) {
    }
}

// Writes where nothing is mapped: an illegal address, whatever p is.
extern "C" __global__ void oob(u8 *p) {
    *(volatile u8 *)(p + (1ull << 48)) = 1;
}
