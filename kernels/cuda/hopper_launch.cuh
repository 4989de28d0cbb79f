// Launches the kernels of hopper_tiles.cuh and hopper_stationary.cuh for one type.
#pragma once
#include "hopper_stationary.cuh"
#include "hopper_tiles.cuh"
#include "launch.cuh"

namespace fxfuse::cuda {

// The driver's function, which no library that we link to has.
using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                     const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    const bool is_there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<EncodeTensorMap>(found) : nullptr;
  }();
  return function;
}

// A map of `rank` dimensions, the innermost first, for boxes of 128 bytes in that one.  What lies
// outside of the tensor is copied as zeros, and floats are rounded to TF32 on the way, to nearest
// and ties to even as cuBLAS does, where the products would cut off the digits that they do not
// see.
template <class T, int kRank>
cudaError_t encode(CUtensorMap& map, const void* address, const cuuint64_t (&sizes)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  const EncodeTensorMap function = encode_tensor_map();
  if (function == nullptr) return cudaErrorNotSupported;
  constexpr CUtensorMapDataType kType = std::is_same_v<T, float> ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                        : std::is_same_v<T, __half>
                                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result =
      function(&map, kType, kRank, const_cast<void*>(address), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class T>
cudaError_t rows(CUtensorMap& map, const void* address, int64_t count, int64_t length, int of_box) {
  const cuuint64_t pitch = length * sizeof(T);
  return encode<T, 2>(map, address, {cuuint64_t(length), cuuint64_t(count)}, {pitch},
                      {kStepBytes / sizeof(T), cuuint32_t(of_box)});
}

// In the order of Columns<O>::place: a row by its number in a pair, its lane, its pair and its
// span, in which order a box is filled.
template <class T, class O>
cudaError_t permuted_rows(CUtensorMap& map, const void* address, int64_t count, int64_t length,
                          int of_box) {
  using C = Columns<O>;
  const cuuint64_t pitch = length * sizeof(T);
  return encode<T, 5>(map, address,
                      {cuuint64_t(length), 2, 4, C::kOwn / 2, cuuint64_t(count / C::kSpan)},
                      {pitch, C::kOwn * pitch, 2 * pitch, C::kSpan * pitch},
                      {kStepBytes / sizeof(T), 2, 4, C::kOwn / 2, cuuint32_t(of_box / C::kSpan)});
}

template <class T, class O, int kGroup>
cudaError_t launch_linear(const LinearForward& p, const LinearPlan& plan, cudaStream_t stream) {
  const bool stays = plan.way == LinearPlan::Way::kStationary, pair = plan.group > kTileColumns;
  const int x_rows = stays ? kRowsOfTurn : kTileRows;
  CUtensorMap x, w;
  // What both blocks of a cluster need, each copies half of.
  cudaError_t error = rows<T>(x, p.input, p.batch, p.features, pair ? x_rows / 2 : x_rows);
  if (error != cudaSuccess) return error;
  error = permuted_rows<T, O>(w, p.linear_weight, p.channels, p.features,
                              stays || pair ? kTileColumns : kTileColumns / 2);
  if (error != cudaSuccess) return error;
  Shape shape = {int64_t(plan.clusters) * plan.cluster, kTilesThreads};
  shape.cluster = plan.cluster;
  if (stays) {
    const auto launch = [&](auto steps) {
      constexpr int kSteps = decltype(steps)::value;
      shape.threads = kStationaryThreads;
      shape.shared = sizeof(StationaryMemory<T, O, kSteps, (kGroup > kTileColumns)>);
      return launch_shared<linear_stationary<T, O, kGroup, kSteps>>(p.device, shape, stream, x, w,
                                                                    p, plan.tiling);
    };
    return plan.tiling.steps > 2 ? launch(std::integral_constant<int, 4>())
                                 : launch(std::integral_constant<int, 2>());
  }
  shape.shared = sizeof(TilesMemory<T, O>);
  return launch_shared<linear_tiles<T, O, kGroup>>(p.device, shape, stream, x, w, p, plan.tiling);
}

template <class T, class O>
cudaError_t linear_typed(const LinearForward& p, const LinearPlan& plan, cudaStream_t stream) {
  switch (plan.group) {
    case 32:
      return launch_linear<T, O, 32>(p, plan, stream);
    case 64:
      return launch_linear<T, O, 64>(p, plan, stream);
    case 128:
      return launch_linear<T, O, 128>(p, plan, stream);
    case 256:
      return launch_linear<T, O, 256>(p, plan, stream);
    case 512:
      return launch_linear<T, O, 512>(p, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fxfuse::cuda
