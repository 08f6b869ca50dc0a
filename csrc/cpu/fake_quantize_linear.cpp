#include <torch/csrc/stable/library.h>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

Tensor run(const QuantizeArguments& a, const std::string& ste, const std::optional<Tensor>& out) {
  const QuantizeSpec checked = check_quantize(a);
  check_ste(a.op, ste);
  const Sizes sizes = sizes_of(a.x);
  const Granularity g = resolve_granularity(a.op, sizes, a.scale, a.zero_point, a.axis, a.block_size);
  const Output y = Output::like(a.op, "out", a.x, checked.x, out);
  y.apart_from(a.op, "out", a.x, "x", /*same_allowed=*/true).apart_from(a.op, "out", a.scale, "scale");
  if (a.zero_point) y.apart_from(a.op, "out", *a.zero_point, "zero_point");
  if (a.x.numel() != 0) {
    const ScaleMap map = make_map(a.op, sizes, strides_of(a.x), strides_of(y.tensor()), g);
    const ParameterTensors parameters(a.scale, a.zero_point, checked.qmin, checked.qmax);
    const int bits = bits_of(checked.x);
    run_spec(quantize_spec(Op::kFakeQuantize, checked, parameters, false), map, a.x.const_data_ptr(),
             y.tensor().mutable_data_ptr(), bits, bits);
  }
  return y.finish();
}

Tensor fake_quantize_linear(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point, int64_t axis,
                            const std::vector<int64_t>& block_size, int64_t output_dtype, bool saturate,
                            int64_t precision, std::optional<int64_t> quant_min, std::optional<int64_t> quant_max,
                            const std::string& arithmetic, const std::string& ste) {
  return run({"fake_quantize_linear", x, scale, zero_point, axis, block_size, output_dtype, saturate, precision,
              quant_min, quant_max, arithmetic},
             ste, std::nullopt);
}

Tensor fake_quantize_linear_out(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point,
                                int64_t axis, const std::vector<int64_t>& block_size, int64_t output_dtype,
                                bool saturate, int64_t precision, std::optional<int64_t> quant_min,
                                std::optional<int64_t> quant_max, const std::string& arithmetic, const std::string& ste,
                                const Tensor& out) {
  return run({"fake_quantize_linear", x, scale, zero_point, axis, block_size, output_dtype, saturate, precision,
              quant_min, quant_max, arithmetic},
             ste, out);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("fake_quantize_linear", TORCH_BOX(&linquant::cpu::fake_quantize_linear));
  m.impl("fake_quantize_linear.out", TORCH_BOX(&linquant::cpu::fake_quantize_linear_out));
}
