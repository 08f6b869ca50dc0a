#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/engines.h"
#include "cpu/range.h"

namespace linquant::cpu {
namespace {

using Result = std::tuple<Tensor, Tensor, Tensor>;

// Scale and zero point from a range: the formula of ONNX DynamicQuantizeLinear, in T.
template <class T>
void choose(const T* lo, const T* hi, int64_t count, const CodeType& code, bool symmetric, T* scale,
            int64_t* zero_point) {
  const IeeeFloats ieee;
  const T qmin = static_cast<T>(code.min), qmax = static_cast<T>(code.max);
  for (int64_t i = 0; i < count; ++i) {
    const T mn = lo[i] < 0 ? lo[i] : T(0), mx = hi[i] > 0 ? hi[i] : T(0);
    const T width = symmetric ? 2 * std::max(-mn, mx) : mx - mn;
    scale[i] = width == 0 ? T(1) : width / (qmax - qmin);
    if (symmetric) {
      zero_point[i] = code.is_signed() ? 0 : (code.max + 1) / 2;
    } else {
      const T z = qmin - mn / scale[i];
      zero_point[i] = exact::encode_integer(z, 0, code.min, code.max);
    }
  }
}

void store_zero_points(const std::vector<int64_t>& from, int bits, void* to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (bits == 16) {
      static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(from[i]);
    } else {
      static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(from[i]);
    }
  }
}

template <class T>
std::vector<int64_t> find_parameters(const ScaleMap& map, const Tensor& x, int64_t count, const CodeType& code,
                                     bool symmetric, void* scale) {
  std::vector<T> lo(count), hi(count);
  std::vector<int64_t> zero_point(count);
  find_range(map, x.const_data_ptr(), type_of(x), /*finite=*/false, lo.data(), hi.data(), count);
  choose(lo.data(), hi.data(), count, code, symmetric, static_cast<T*>(scale), zero_point.data());
  return zero_point;
}

Result run(const Tensor& x, std::optional<int64_t> axis, const Sizes& block_size, int64_t output_dtype, bool symmetric,
           const std::optional<Tensor>& y_out, const std::optional<Tensor>& scale_out,
           const std::optional<Tensor>& zero_point_out) {
  constexpr char kOp[] = "dynamic_quantize_linear";
  check_input(kOp, x);
  const CodeType& code = *check_dynamic_output(kOp, output_dtype);
  const Sizes sizes = sizes_of(x);
  Sizes result_sizes;
  const Granularity g = resolve_reduction(kOp, sizes, axis, block_size, result_sizes);
  const DataType type = range_type(type_of(x));
  const Output y = Output::like(kOp, "y", x, storage_type(code), y_out);
  const Output scale = Output::contiguous(kOp, "scale", x, result_sizes, type, scale_out);
  const Output zero_point = Output::contiguous(kOp, "zero_point", x, result_sizes, storage_type(code), zero_point_out);
  y.apart_from(kOp, "y", x, "x");
  scale.apart_from(kOp, "scale", x, "x");
  zero_point.apart_from(kOp, "zero_point", x, "x");
  if (y_out) {
    scale.apart_from(kOp, "scale", *y_out, "y");
    zero_point.apart_from(kOp, "zero_point", *y_out, "y");
  }
  if (scale_out) zero_point.apart_from(kOp, "zero_point", *scale_out, "scale");

  const int64_t count = scale.tensor().numel();
  const ScaleMap reduction = make_map(kOp, sizes, strides_of(x), strides_of(x), g);
  void* scales = scale.tensor().mutable_data_ptr();
  const auto zero_points = type == DataType::kFloat64
                               ? find_parameters<double>(reduction, x, count, code, symmetric, scales)
                               : find_parameters<float>(reduction, x, count, code, symmetric, scales);
  store_zero_points(zero_points, code.bits, zero_point.tensor().mutable_data_ptr());

  if (x.numel() != 0) {
    QuantizeSpec q{};
    q.code = &code;
    q.qmin = code.min;
    q.qmax = code.max;
    q.x = type_of(x);
    q.scale = q.precision = type;
    q.wide = type == DataType::kFloat64;
    const ParameterTensors parameters(scale.tensor(), zero_point.tensor(), code.min, code.max);
    run_spec(quantize_spec(Op::kQuantize, q, parameters, false),
             make_map(kOp, sizes, strides_of(x), strides_of(y.tensor()), g), x.const_data_ptr(),
             y.tensor().mutable_data_ptr(), bits_of(q.x), code_bits(code, false));
  }
  return {y.finish(), scale.finish(), zero_point.finish()};
}

Result dynamic_quantize_linear(const Tensor& x, std::optional<int64_t> axis, const std::vector<int64_t>& block_size,
                               int64_t output_dtype, bool symmetric) {
  return run(x, axis, block_size, output_dtype, symmetric, std::nullopt, std::nullopt, std::nullopt);
}

Result dynamic_quantize_linear_out(const Tensor& x, std::optional<int64_t> axis, const std::vector<int64_t>& block_size,
                                   int64_t output_dtype, bool symmetric, const Tensor& y, const Tensor& scale,
                                   const Tensor& zero_point) {
  return run(x, axis, block_size, output_dtype, symmetric, y, scale, zero_point);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("dynamic_quantize_linear", TORCH_BOX(&linquant::cpu::dynamic_quantize_linear));
  m.impl("dynamic_quantize_linear.out", TORCH_BOX(&linquant::cpu::dynamic_quantize_linear_out));
}
