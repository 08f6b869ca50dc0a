#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/range.h"

namespace linquant::cpu {
namespace {

using Result = std::tuple<Tensor, Tensor>;

Result run(const Tensor& x, std::optional<int64_t> axis, const Sizes& block_size, const std::optional<Tensor>& r_min,
           const std::optional<Tensor>& r_max) {
  constexpr char kOp[] = "min_max";
  check_input(kOp, x);
  const Sizes sizes = sizes_of(x);
  Sizes result_sizes;
  const Granularity g = resolve_reduction(kOp, sizes, axis, block_size, result_sizes);
  const DataType type = range_type(type_of(x));
  const Output lo = Output::contiguous(kOp, "r_min", x, result_sizes, type, r_min);
  const Output hi = Output::contiguous(kOp, "r_max", x, result_sizes, type, r_max);
  lo.apart_from(kOp, "r_min", x, "x");
  hi.apart_from(kOp, "r_max", x, "x");
  if (r_min) hi.apart_from(kOp, "r_max", *r_min, "r_min");
  find_range(make_map(kOp, sizes, strides_of(x), strides_of(x), g), x.const_data_ptr(), type_of(x), /*finite=*/true,
             lo.tensor().mutable_data_ptr(), hi.tensor().mutable_data_ptr(), lo.tensor().numel());
  return {lo.finish(), hi.finish()};
}

Result min_max(const Tensor& x, std::optional<int64_t> axis, const std::vector<int64_t>& block_size) {
  return run(x, axis, block_size, std::nullopt, std::nullopt);
}

Result min_max_out(const Tensor& x, std::optional<int64_t> axis, const std::vector<int64_t>& block_size,
                   const Tensor& r_min, const Tensor& r_max) {
  return run(x, axis, block_size, r_min, r_max);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("min_max", TORCH_BOX(&linquant::cpu::min_max));
  m.impl("min_max.out", TORCH_BOX(&linquant::cpu::min_max_out));
}
