#include <torch/csrc/stable/library.h>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

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
    const ParameterTensors parameters(a.scale, a.zero_point, code.min, code.max);
    run_spec(dequantize_spec(checked, parameters), map, x.const_data_ptr(), y.tensor().mutable_data_ptr(),
             checked.floating ? bits_of(checked.x) : code_bits(code, checked.packed), bits_of(checked.output));
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
