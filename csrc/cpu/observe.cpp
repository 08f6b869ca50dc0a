#include <torch/csrc/stable/library.h>

#include "cpu/range.h"

namespace linquant::cpu {
namespace {

void observe_(const Tensor& x, const Tensor& r_min, const Tensor& r_max, const Tensor& nonfinite,
              const std::optional<Tensor>& counts, std::optional<int64_t> axis,
              const std::vector<int64_t>& block_size) {
  const ObserveArguments a{"observe_", x, r_min, r_max, nonfinite, counts, axis, block_size};
  const Granularity g = check_observe(a);
  if (x.numel() == 0) return;
  const ScaleMap map = make_map(a.op, sizes_of(x), strides_of(x), strides_of(x), g);
  const Statistics statistics{static_cast<float*>(r_min.mutable_data_ptr()),
                              static_cast<float*>(r_max.mutable_data_ptr()),
                              static_cast<int64_t*>(nonfinite.mutable_data_ptr()),
                              counts ? static_cast<int64_t*>(counts->mutable_data_ptr()) : nullptr,
                              counts ? sizes_of(*counts).back() : 0,
                              r_min.numel()};
  observe(map, x.const_data_ptr(), type_of(x), statistics);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) { m.impl("observe_", TORCH_BOX(&linquant::cpu::observe_)); }
