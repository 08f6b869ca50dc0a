// Smallest and largest element for each scale number of a map. Minimum and maximum do not depend on order, so neither
// do the results on how the work is shared.
#pragma once

#include "core/scale_map.h"
#include "plan.h"

namespace linquant::cpu {

// The types of min_max: float32, or float64 for float64 x.
DataType range_type(DataType x);

// Fills lo and hi, `count` elements each of range_type(x_type). NaN is left out, and infinities too where `finite`; a
// slice with nothing left is +inf, -inf. Zeros are +0.
void find_range(const ScaleMap& map, const void* x, DataType x_type, bool finite, void* lo, void* hi, int64_t count);

}  // namespace linquant::cpu
