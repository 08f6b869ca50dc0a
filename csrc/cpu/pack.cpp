// pack and unpack: bytes that hold one 4-bit or 2-bit code each, to and from packed bytes.
#include <torch/csrc/stable/library.h>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

struct CopySpec {
  RowKernel kernel;
  uint32_t mask, flip;
};

class CopyEngine {
 public:
  static constexpr bool kAnyBlock = true;
  explicit CopyEngine(const CopySpec& spec) : spec_(spec) {}
  void fold(const Runs&, const Walk&) {}
  void row(const void* x, void* y, int64_t n, int64_t, const Walk&) const {
    spec_.kernel({x, y, n, n, {}, nullptr, spec_.mask, spec_.flip});
  }

 private:
  const CopySpec& spec_;
};

const Kernels& kernels() {
  const Kernels* active = active_kernels();
  return active ? *active : kBaseKernels;
}

Granularity one_scale(const Sizes& sizes) { return {Sizes(sizes.size(), INT64_MAX), Sizes(sizes.size(), 0)}; }

Tensor pack_into(const Tensor& x, int64_t x_dtype, const std::optional<Tensor>& out) {
  const CodeType& code = *check_pack("pack", x, x_dtype);
  const int per_byte = 8 / code.bits;
  const Sizes sizes = sizes_of(x);
  const Output y = Output::contiguous("pack", "out", x, packed_sizes(sizes, per_byte), DataType::kUInt8, out);
  y.apart_from("pack", "out", x, "x");
  if (x.numel() != 0) {
    const ScaleMap map = make_map("pack", sizes, strides_of(x), contiguous_strides(sizes, per_byte), one_scale(sizes));
    run<CopyEngine>(CopySpec{kernels().pack[per_byte / 4], 0, 0}, map, x.const_data_ptr(),
                    y.tensor().mutable_data_ptr(), 8, code.bits);
  }
  return y.finish();
}

Tensor unpack_into(const Tensor& x, int64_t x_dtype, std::optional<int64_t> packed_size,
                   const std::optional<Tensor>& out) {
  Sizes sizes;
  const CodeType& code = *check_unpack("unpack", x, x_dtype, packed_size, sizes);
  const int per_byte = 8 / code.bits;
  const Output y = Output::contiguous("unpack", "out", x, sizes, storage_type(code), out);
  y.apart_from("unpack", "out", x, "x");
  if (y.tensor().numel() != 0) {
    const Tensor packed = row_major(x);
    const ScaleMap map = make_map("unpack", sizes, contiguous_strides(sizes, per_byte), contiguous_strides(sizes),
                                  one_scale(sizes), true);
    const uint32_t flip = code.is_signed() ? 1u << (code.bits - 1) : 0;
    run<CopyEngine>(CopySpec{kernels().unpack[per_byte / 4], (1u << code.bits) - 1, flip}, map, packed.const_data_ptr(),
                    y.tensor().mutable_data_ptr(), code.bits, 8);
  }
  return y.finish();
}

Tensor pack(const Tensor& x, int64_t x_dtype) { return pack_into(x, x_dtype, std::nullopt); }
Tensor pack_out(const Tensor& x, int64_t x_dtype, const Tensor& out) { return pack_into(x, x_dtype, out); }
Tensor unpack_out(const Tensor& x, int64_t x_dtype, std::optional<int64_t> packed_size, const Tensor& out) {
  return unpack_into(x, x_dtype, packed_size, out);
}

}  // namespace

Tensor unpack(const Tensor& x, int64_t x_dtype, std::optional<int64_t> packed_size) {
  return unpack_into(x, x_dtype, packed_size, std::nullopt);
}

}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("pack", TORCH_BOX(&linquant::cpu::pack));
  m.impl("pack.out", TORCH_BOX(&linquant::cpu::pack_out));
  m.impl("unpack", TORCH_BOX(&linquant::cpu::unpack));
  m.impl("unpack.out", TORCH_BOX(&linquant::cpu::unpack_out));
}
