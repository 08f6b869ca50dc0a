#include <torch/csrc/stable/library.h>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

Tensor run(const QuantizeArguments& a, const std::optional<Tensor>& out) {
  const QuantizeSpec checked = check_quantize(a);
  const Sizes sizes = sizes_of(a.x);
  const Granularity g = resolve_granularity(a.op, sizes, a.scale, a.zero_point, a.axis, a.block_size);
  const CodeType& code = *checked.code;
  const int per_byte = a.packed ? 8 / code.bits : 1;
  const Output y = a.packed ? Output::contiguous(a.op, "out", a.x, packed_sizes(sizes, per_byte), DataType::kUInt8, out)
                            : Output::like(a.op, "out", a.x, storage_type(code), out);
  y.apart_from(a.op, "out", a.x, "x").apart_from(a.op, "out", a.scale, "scale");
  if (a.zero_point) y.apart_from(a.op, "out", *a.zero_point, "zero_point");
  if (a.x.numel() != 0) {
    const Sizes y_strides = a.packed ? contiguous_strides(sizes, per_byte) : strides_of(y.tensor());
    const ScaleMap map = make_map(a.op, sizes, strides_of(a.x), y_strides, g);
    const ParameterTensors parameters(a.scale, a.zero_point);
    run_spec(quantize_spec(Op::kQuantize, checked, parameters, a.packed), map, a.x.const_data_ptr(),
             y.tensor().mutable_data_ptr(), bits_of(checked.x), code_bits(code, a.packed));
  }
  return y.finish();
}

Tensor quantize_linear(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point, int64_t axis,
                       const std::vector<int64_t>& block_size, int64_t output_dtype, bool saturate, int64_t precision,
                       std::optional<int64_t> quant_min, std::optional<int64_t> quant_max,
                       const std::string& arithmetic, bool packed) {
  return run({"quantize_linear", x, scale, zero_point, axis, block_size, output_dtype, saturate, precision, quant_min,
              quant_max, arithmetic, packed},
             std::nullopt);
}

Tensor quantize_linear_out(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point, int64_t axis,
                           const std::vector<int64_t>& block_size, int64_t output_dtype, bool saturate,
                           int64_t precision, std::optional<int64_t> quant_min, std::optional<int64_t> quant_max,
                           const std::string& arithmetic, bool packed, const Tensor& out) {
  return run({"quantize_linear", x, scale, zero_point, axis, block_size, output_dtype, saturate, precision, quant_min,
              quant_max, arithmetic, packed},
             out);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("quantize_linear", TORCH_BOX(&linquant::cpu::quantize_linear));
  m.impl("quantize_linear.out", TORCH_BOX(&linquant::cpu::quantize_linear_out));
}
