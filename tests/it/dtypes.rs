//! Every element type travels bit for bit, in any length, and its bytes are looked at before they become values
//! (field report R57).

use transfer_tensor::cudarc::driver::{CudaSlice, DevicePtr, sys};
use transfer_tensor::{DType, DynTensor, Element, Strategy, TensorOptions, TransferTensor};

use crate::machines::{pattern, xor_on_device, xor_on_host};
use crate::support::{Gpu, H200, SPARK};

/// The elements whose bytes these are.
fn elements<T: Element>(bytes: &[u8]) -> Vec<T> {
    assert!(bytes.len().is_multiple_of(size_of::<T>()));
    let mut values = Vec::<T>::with_capacity(bytes.len() / size_of::<T>());
    // SAFETY: the Vec has room for them; every pattern of bytes that the tests use is a value of `T` (`bool` gets 0 and 1).
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), values.as_mut_ptr().cast(), bytes.len());
        values.set_len(bytes.len() / size_of::<T>());
    }
    values
}

/// The bytes of `values`.
fn bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: an element has no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// All patterns of the first 256 bytes' worth of elements, then something irregular: signalling and quiet NaNs with
/// payloads, infinities, denormals, negative zero among them.
fn hard_values(dtype: DType, len: usize) -> Vec<u8> {
    let mut all = pattern(len * dtype.size(), 11);
    let special: &[&[u8]] = match dtype {
        DType::Bool => {
            all.iter_mut().for_each(|byte| *byte &= 1);
            return all;
        }
        DType::F16 => &[&[0x01, 0x7C], &[0x01, 0xFE], &[0x00, 0x80], &[0x00, 0x7C], &[0x01, 0x00]],
        DType::BF16 => &[&[0x81, 0x7F], &[0xC1, 0xFF], &[0x00, 0x80], &[0x80, 0x7F], &[0x01, 0x00]],
        DType::F32 => &[
            &[0x01, 0x00, 0x80, 0x7F],
            &[0xEF, 0xBE, 0xED, 0xFF],
            &[0x00, 0x00, 0x00, 0x80],
            &[0x01, 0x00, 0x00, 0x00],
        ],
        DType::F64 => &[&[0x01, 0, 0, 0, 0, 0, 0xF0, 0x7F], &[0xEF, 0xBE, 0xAD, 0xDE, 0, 0, 0xF8, 0xFF]],
        DType::F8E4M3 => &[&[0x7F], &[0xFF], &[0x80], &[0x01]],
        DType::F8E5M2 => &[&[0x7D], &[0xFF], &[0x7C], &[0x80]],
        _ => &[&[0xFF], &[0x80], &[0x7F]],
    };
    for (i, value) in special.iter().enumerate() {
        let at = i * dtype.size();
        if let Some(place) = all.get_mut(at..at + value.len()) {
            place.copy_from_slice(value);
        }
    }
    all
}

fn travels<T: Element>(gpu: &Gpu, strategy: Strategy, len: usize) {
    let wanted = hard_values(T::DTYPE, len);
    let what = || format!("{} x {len}, {strategy}", T::DTYPE);
    let mut tensor = gpu.device.tensor().strategy(strategy).from_vec(elements::<T>(&wanted), [len]).unwrap();
    assert_eq!(tensor.bytes(), wanted.len());
    // There, changed, and back.
    xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
    let mut changed = wanted.clone();
    xor_on_host(&mut changed);
    match tensor.host() {
        Ok(host) => assert_eq!(bytes(&host), changed, "{}", what()),
        // What the device wrote is no bool.
        Err(error) => {
            assert_eq!(T::DTYPE, DType::Bool);
            let index = changed.iter().position(|&byte| byte > 1).unwrap();
            assert!(error.is_invalid_input());
            let text = error.to_string();
            assert!(text.contains(&format!("element {index} ")) && text.contains("BOOL"), "{text}");
        }
    }
    xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
    assert_eq!(bytes(&tensor.host().unwrap()), wanted, "{}", what());
    // By ticket, as bytes, as a Vec.
    let tensor = tensor.to_device().unwrap().wait().unwrap().to_host().unwrap().wait().unwrap();
    let dynamic = DynTensor::from(tensor);
    assert_eq!(dynamic.dtype(), T::DTYPE);
    assert_eq!(*dynamic.bytes().host().unwrap(), *wanted);
    let tensor: TransferTensor<T> = dynamic.downcast().unwrap();
    assert_eq!(bytes(&tensor.into_vec().unwrap()), wanted, "{}", what());
}

fn travels_all_ways<T: Element>(gpu: &Gpu) {
    for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
        for len in [1, 7, 257] {
            travels::<T>(gpu, strategy, len);
        }
    }
    // On the host alone.
    let wanted = hard_values(T::DTYPE, 7);
    let tensor = TransferTensor::from_vec(elements::<T>(&wanted), [7]).unwrap();
    assert_eq!(bytes(&tensor.host().unwrap()), wanted);
    // As a slice of cudarc's.
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_vec(elements::<T>(&wanted), [7]).unwrap();
    let slice: CudaSlice<T> = tensor.into_cuda_slice().unwrap();
    let address = slice.device_ptr(&gpu.stream).0;
    let mut tensor = gpu.device.tensor().from_cuda_slice(slice, [7]).unwrap();
    assert_eq!(tensor.device(&gpu.stream).unwrap().address(), address);
    assert_eq!(bytes(&tensor.host().unwrap()), wanted);
    let changed = hard_values(T::DTYPE, 14)[7 * size_of::<T>()..].to_vec();
    tensor.host_mut().unwrap().copy_from_slice(&elements::<T>(&changed));
    let mut read = elements::<T>(&wanted);
    gpu.stream.memcpy_dtoh(&tensor.device(&gpu.stream).unwrap(), &mut read).unwrap();
    gpu.stream.synchronize().unwrap();
    assert_eq!(bytes(&read), changed);
}

macro_rules! every_type {
    ($($(#[$attribute:meta])* $name:ident: $type:ty),+ $(,)?) => {$(
        $(#[$attribute])*
        #[test]
        fn $name() {
            for profile in [H200, SPARK] {
                let gpu = Gpu::any(profile);
                travels_all_ways::<$type>(&gpu);
                gpu.finish();
            }
        }
    )+};
}

every_type! {
    bool_travels: bool,
    u8_travels: u8,
    i8_travels: i8,
    u16_travels: u16,
    i16_travels: i16,
    u32_travels: u32,
    i32_travels: i32,
    u64_travels: u64,
    i64_travels: i64,
    f32_travels: f32,
    f64_travels: f64,
    #[cfg(feature = "half")] f16_travels: half::f16,
    #[cfg(feature = "half")] bf16_travels: half::bf16,
    #[cfg(feature = "float8")] f8e4m3_travels: float8::F8E4M3,
    #[cfg(feature = "float8")] f8e5m2_travels: float8::F8E5M2,
}

/// Bytes that are no bool do not become a tensor of bool; what a device writes later is refused where it is read.
#[test]
fn bytes_that_are_no_bool_are_refused_where_they_are_read() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let mut tensor = gpu.device.tensor().zeros::<bool>([100]).unwrap();
        gpu.stream.memset_zeros(&mut tensor.device_mut(&gpu.stream).unwrap()).unwrap();
        assert!(tensor.host().unwrap().iter().all(|&bit| !bit));
        let mut dynamic = DynTensor::from(tensor);
        dynamic.bytes_mut().host_mut().unwrap()[42] = 0x80;
        let refused = dynamic.downcast::<bool>().unwrap_err();
        assert_eq!(refused.error.to_string(), "element 42 holds byte 0x80, which is no BOOL");
        let mut dynamic = refused.value;
        dynamic.bytes_mut().host_mut().unwrap()[42] = 1;
        let mut tensor: TransferTensor<bool> = dynamic.downcast().unwrap();
        let guard = tensor.device_mut(&gpu.stream).unwrap();
        // SAFETY: inside the guard's memory, on its stream; what a kernel might write.
        let set = unsafe { sys::cuMemsetD8Async(guard.address() + 42, 0x80, 1, gpu.stream.cu_stream()) };
        set.result().unwrap();
        drop(guard);
        let error = tensor.host().unwrap_err();
        assert_eq!(error.to_string(), "element 42 holds byte 0x80, which is no BOOL");
        assert!(error.is_invalid_input());
        assert!(tensor.host_mut().is_err());
        assert!(tensor.view(..42).unwrap().host().unwrap().iter().all(|&bit| !bit));
        let error = tensor.view(40..50).unwrap().host().unwrap_err();
        assert!(error.to_string().starts_with("element 2 "), "{error}");
        let shared = tensor.into_shared();
        assert!(shared.host().is_err() && shared.to_vec().is_err());
        tensor = TransferTensor::from_shared(shared).unwrap();
        // The tensor comes back from a refusal.
        let refused = tensor.into_vec().unwrap_err();
        assert!(refused.error.is_invalid_input());
        let mut dynamic = DynTensor::from(refused.value);
        dynamic.bytes_mut().host_mut().unwrap()[42] = 1;
        let tensor: TransferTensor<bool> = dynamic.downcast().unwrap();
        assert_eq!(tensor.into_vec().unwrap().iter().filter(|&&bit| bit).count(), 1);
        gpu.finish();
    }
}

#[test]
fn a_tensor_of_another_type_is_refused_by_name_and_comes_back() {
    let tensor = DynTensor::zeros(TensorOptions::host_only(), DType::BF16, [3]).unwrap();
    let refused = tensor.downcast::<f32>().unwrap_err();
    let text = refused.error.to_string();
    assert!(refused.error.is_invalid_input() && text.contains("BF16") && text.contains("F32"), "{text}");
    assert_eq!((refused.value.dtype(), refused.value.shape().dims()), (DType::BF16, &[3][..]));
    // Same size, other type: not the same.
    let tensor = DynTensor::zeros(TensorOptions::host_only(), DType::F32, [2, 2]).unwrap();
    assert!(tensor.downcast::<u32>().is_err());
    let error = "F4".parse::<DType>().unwrap_err();
    assert!(error.is_invalid_input() && error.to_string().contains("\"F4\""), "{error}");
}

/// Types of 4 bits travel as bytes, two to a byte.
#[test]
fn four_bit_values_travel_as_bytes() {
    let gpu = Gpu::any(H200);
    let packed: Vec<u8> = (0..=255).collect();
    let mut tensor = gpu.device.tensor().from_vec(packed.clone(), [16, 16]).unwrap();
    xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
    xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
    assert_eq!(tensor.into_vec().unwrap(), packed);
    gpu.finish();
}

#[test]
fn bytes_get_a_type_and_shape_only_if_they_fit() {
    let gpu = Gpu::any(H200);
    let tensor = || gpu.device.tensor().from_vec(pattern(24, 1), [24]).unwrap();
    let refused = DynTensor::from_bytes(tensor(), DType::F64, [4]).unwrap_err();
    assert!(refused.error.is_invalid_input());
    assert_eq!(refused.value.into_vec().unwrap(), pattern(24, 1));
    assert!(DynTensor::from_bytes(tensor(), DType::U16, [usize::MAX, 2]).unwrap_err().error.is_invalid_input());
    let typed = DynTensor::from_bytes(tensor(), DType::U16, [3, 4]).unwrap();
    assert_eq!((typed.dtype(), typed.shape().dims()), (DType::U16, &[3, 4][..]));
    // On the device already: the memory there keeps serving.
    let mut typed = typed;
    xor_on_device(&gpu.context, &gpu.stream, &mut typed.bytes_mut().device_mut(&gpu.stream).unwrap());
    let before = typed.bytes().device(&gpu.stream).unwrap().address();
    let refused_or_same = typed.downcast::<u16>();
    let tensor = refused_or_same.expect("device memory is aligned, and so is what a Vec of 24 bytes gets");
    assert_eq!(tensor.device(&gpu.stream).unwrap().address(), before);
    let mut expected = pattern(24, 1);
    xor_on_host(&mut expected);
    assert_eq!(bytes(&tensor.host().unwrap()), expected);
    // A slice of u16 was never allocated: this memory can not become one, and says so.
    let refused = tensor.into_cuda_slice().unwrap_err();
    assert!(refused.error.is_unsupported());
    assert_eq!(bytes(&refused.value.into_vec().unwrap()), expected);
    gpu.finish();
}
