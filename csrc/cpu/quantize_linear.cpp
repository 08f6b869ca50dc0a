#include <torch/csrc/stable/library.h>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

// Codes from `x`, laid out as `y` is.
void write_codes(const QuantizeArguments& a, const QuantizeSpec& checked, const Granularity& g, const Tensor& y,
                 const Sizes& y_strides) {
  const ScaleMap map = make_map(a.op, sizes_of(a.x), strides_of(a.x), y_strides, g);
  const ParameterTensors parameters(a.scale, a.zero_point, checked.qmin, checked.qmax);
  run_spec(quantize_spec(Op::kQuantize, checked, parameters, a.packed), map, a.x.const_data_ptr(), y.mutable_data_ptr(),
           bits_of(checked.x), code_bits(*checked.code, a.packed));
}

// Codes as numbers: codes, and their values at scale 1. int32 codes are exact in double only.
void write_numbers(const QuantizeArguments& a, const QuantizeSpec& checked, const Granularity& g, const Tensor& y) {
  const Tensor codes = Output::like(a.op, "out", y, storage_type(*checked.code), std::nullopt).tensor();
  write_codes(a, checked, g, codes, strides_of(codes));
  DequantizeSpec d{};
  d.code = checked.code;
  d.x = type_of(codes);
  d.output = type_of(y);
  const bool wide = d.output == DataType::kFloat64;
  d.scale = wide ? DataType::kFloat64 : DataType::kFloat32;
  const Tensor one = Output::contiguous(a.op, "", a.x, Sizes(), d.scale, std::nullopt).tensor();
  store_value(d.scale, one.mutable_data_ptr(), 0, 1.0);
  Granularity whole = g;
  std::fill(whole.stride.begin(), whole.stride.end(), 0);
  const ParameterTensors parameters(one, std::nullopt, 0, 0);
  run_spec(dequantize_spec(d, parameters), make_map(a.op, sizes_of(y), strides_of(codes), strides_of(y), whole),
           codes.const_data_ptr(), y.mutable_data_ptr(), code_bits(*d.code, false), bits_of(d.output));
}

Tensor run(const QuantizeArguments& a, const std::optional<Tensor>& out) {
  const QuantizeSpec checked = check_quantize(a);
  const Sizes sizes = sizes_of(a.x);
  const Granularity g = resolve_granularity(a.op, sizes, a.scale, a.zero_point, a.axis, a.block_size);
  const CodeType& code = *checked.code;
  const int per_byte = a.packed ? 8 / code.bits : 1;
  const DataType type = a.float_codes ? float_code_type(code, checked.x) : storage_type(code);
  const Output y = a.packed ? Output::contiguous(a.op, "out", a.x, packed_sizes(sizes, per_byte), DataType::kUInt8, out)
                            : Output::like(a.op, "out", a.x, type, out);
  y.apart_from(a.op, "out", a.x, "x").apart_from(a.op, "out", a.scale, "scale");
  if (a.zero_point) y.apart_from(a.op, "out", *a.zero_point, "zero_point");
  if (a.x.numel() == 0) return y.finish();
  if (a.float_codes) {
    write_numbers(a, checked, g, y.tensor());
  } else {
    write_codes(a, checked, g, y.tensor(), a.packed ? contiguous_strides(sizes, per_byte) : strides_of(y.tensor()));
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

Tensor quantize_linear_float_codes(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point,
                                   int64_t axis, const std::vector<int64_t>& block_size, int64_t output_dtype,
                                   bool saturate, int64_t precision, std::optional<int64_t> quant_min,
                                   std::optional<int64_t> quant_max, const std::string& arithmetic) {
  return run({"quantize_linear", x, scale, zero_point, axis, block_size, output_dtype, saturate, precision, quant_min,
              quant_max, arithmetic, /*packed=*/false, /*float_codes=*/true},
             std::nullopt);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("quantize_linear", TORCH_BOX(&linquant::cpu::quantize_linear));
  m.impl("quantize_linear.float_codes", TORCH_BOX(&linquant::cpu::quantize_linear_float_codes));
  m.impl("quantize_linear.out", TORCH_BOX(&linquant::cpu::quantize_linear_out));
}
