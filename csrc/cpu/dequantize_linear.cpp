#include <torch/csrc/stable/library.h>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

const RowKernel* find_kernels(const Spec& s, int64_t largest) {
  const Kernels* kernels = active_kernels();
  if (!kernels || s.code->bits == 32 || s.y == DataType::kFloat64 || s.parameters.scale_type == DataType::kFloat64)
    return nullptr;
  // The difference of code and zero point is taken in int32.
  if (!s.code->is_float && largest > INT32_MAX - 65536) return nullptr;
  const Input output = s.y == DataType::kFloat16 ? kF16 : s.y == DataType::kBFloat16 ? kBF16 : kF32;
  Codes codes;
  if (s.code->is_float) {
    codes = s.packed ? kFloat4 : kFloat8;
  } else {
    codes = s.code->bits == 16 ? kInteger16 : !s.packed ? kInteger8 : s.code->bits == 4 ? kInteger4 : kInteger2;
  }
  return kernels->dequantize[codes][output];
}

Tensor run(const DequantizeArguments& a, const std::optional<Tensor>& out) {
  const DequantizeSpec checked = check_dequantize(a);
  const Granularity g = resolve_granularity(a.op, checked.sizes, a.scale, a.zero_point, a.axis, a.block_size);
  const CodeType& code = *checked.code;
  const Output y = checked.packed ? Output::contiguous(a.op, "out", a.x, checked.sizes, checked.output, out)
                                  : Output::like(a.op, "out", a.x, checked.output, out);
  y.apart_from(a.op, "out", a.x, "x").apart_from(a.op, "out", a.scale, "scale");
  if (a.zero_point) y.apart_from(a.op, "out", *a.zero_point, "zero_point");
  if (y.tensor().numel() != 0) {
    const Tensor x = checked.packed ? row_major(a.x) : a.x;
    const Sizes x_strides = checked.packed ? contiguous_strides(checked.sizes, 8 / code.bits) : strides_of(x);
    const ScaleMap map = make_map(a.op, checked.sizes, x_strides, strides_of(y.tensor()), g, checked.packed);
    const ParameterTensors parameters(a.scale, a.zero_point);
    Spec s{};
    s.op = Op::kDequantize;
    s.parameters = parameters.get();
    s.code = &code;
    s.format = code.format;
    s.y = checked.output;
    s.packed = checked.packed;
    s.mask = code.bits == 32 ? 0xffffffffu : (1u << code.bits) - 1;
    s.flip = code.is_signed() ? 1u << (code.bits - 1) : 0;
    s.kernels = find_kernels(s, code.is_float ? 0 : largest_zero_point(s.parameters, parameters.count()));
    run_spec(s, map, x.const_data_ptr(), y.tensor().mutable_data_ptr(), code_bits(code, checked.packed),
             bits_of(checked.output));
  }
  return y.finish();
}

Tensor dequantize_linear(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point, int64_t axis,
                         const std::vector<int64_t>& block_size, int64_t output_dtype, int64_t x_dtype,
                         std::optional<int64_t> packed_size) {
  return run({"dequantize_linear", x, scale, zero_point, axis, block_size, output_dtype, x_dtype, packed_size},
             std::nullopt);
}

Tensor dequantize_linear_out(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point,
                             int64_t axis, const std::vector<int64_t>& block_size, int64_t output_dtype,
                             int64_t x_dtype, std::optional<int64_t> packed_size, const Tensor& out) {
  return run({"dequantize_linear", x, scale, zero_point, axis, block_size, output_dtype, x_dtype, packed_size}, out);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("dequantize_linear", TORCH_BOX(&linquant::cpu::dequantize_linear));
  m.impl("dequantize_linear.out", TORCH_BOX(&linquant::cpu::dequantize_linear_out));
}
