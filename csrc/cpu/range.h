// What x holds for each scale number of a map: its smallest and largest element, and a histogram. Minimum, maximum and
// integer sums do not depend on order, so neither do the results on how the work is shared.
#pragma once

#include "core/scale_map.h"
#include "plan.h"

namespace linquant::cpu {

// The types of min_max: float32, or float64 for float64 x.
DataType range_type(DataType x);

// Fills lo and hi, `count` elements each of range_type(x_type). NaN is left out, and infinities too where `finite`; a
// slice with nothing left is +inf, -inf. Zeros are +0.
void find_range(const ScaleMap& map, const void* x, DataType x_type, bool finite, void* lo, void* hi, int64_t count);

// What an observer knows, `count` slices of it.
struct Statistics {
  float *lo, *hi;      // of the finite elements as float32; infinite where there were none
  int64_t* nonfinite;  // one number for all
  int64_t* counts;     // null, or `bins` for each slice
  int64_t bins;        // a power of two: the bin of x is the top bits of its float32 pattern
  int64_t count;
};

// Takes x in as well.
void observe(const ScaleMap& map, const void* x, DataType x_type, const Statistics& statistics);

}  // namespace linquant::cpu
