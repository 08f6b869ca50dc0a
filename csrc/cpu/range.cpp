#include "cpu/range.h"

#include <limits>
#include <mutex>
#include <vector>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

struct DoubleRange {
  using T = double;
  static void reduce(const void* x, int64_t n, bool finite, T* lo, T* hi) {
    const auto* p = static_cast<const double*>(x);
    for (int64_t j = 0; j < n; ++j) accumulate_one(p[j], finite, lo, hi);
  }
  static void accumulate(const void* x, int64_t n, bool finite, T* lo, T* hi) {
    const auto* p = static_cast<const double*>(x);
    for (int64_t j = 0; j < n; ++j) accumulate_one(p[j], finite, lo + j, hi + j);
  }

 private:
  static void accumulate_one(double v, bool finite, T* lo, T* hi) {
    if (finite) v += v * 0.0;  // infinities become NaN, which no comparison takes
    *lo = v < *lo ? v : *lo;
    *hi = v > *hi ? v : *hi;
  }
};

// One slice of the work, by one thread.
template <class T, class Reduce, class Accumulate>
void reduce_map(const ScaleMap& map, const char* x, int bytes, const Reduce& reduce, const Accumulate& accumulate,
                T* lo, T* hi) {
  ScaleMap outer = map;
  const Loop inner = outer.loop[--outer.count];
  int64_t rows = 1;
  for (int i = 0; i < outer.count; ++i) rows *= outer.loop[i].size;
  const IeeeFloats ieee;
  const ThreadLocal<GatherBuffer> buffer;
  RowCursor row(outer, 0);
  for (int64_t r = 0; r < rows; ++r, row.next()) {
    const bool gathers = inner.x_stride != 1 && inner.size > 1;
    const int64_t piece = gathers ? kConstants : inner.size;
    for (int64_t start = 0; start < inner.size; start += piece) {
      const int64_t n = std::min(piece, inner.size - start);
      const char* from = x + (row.x() + start * inner.x_stride) * bytes;
      if (gathers) {
        gather(from, inner.x_stride, n, bytes, buffer->bytes);
        from = buffer->bytes;
      }
      T* l = lo + row.scale();
      T* h = hi + row.scale();
      if (inner.constant()) {
        reduce(from, n, l, h);
      } else if (inner.block == 1 && inner.scale_stride == 1) {
        accumulate(from, n, l + start, h + start);
      } else {
        for (int64_t j = 0; j < n;) {
          const int64_t run = (start + j) / inner.block, end = std::min(n, (run + 1) * inner.block - start);
          reduce(from + j * bytes, end - j, l + run * inner.scale_stride, h + run * inner.scale_stride);
          j = end;
        }
      }
    }
  }
}

// The iterations [begin, end) of one loop; begin is at the start of a run.
ScaleMap slice(const ScaleMap& map, int loop, int64_t begin, int64_t end, int64_t& x_offset, int64_t& scale_offset) {
  ScaleMap s = map;
  Loop& l = s.loop[loop];
  l.size = end - begin;
  x_offset = begin * l.x_stride;
  scale_offset = l.constant() && map.loop[loop].constant() ? 0 : begin / l.block * l.scale_stride;
  return s;
}

template <class T, class Reduce, class Accumulate>
void share(const ScaleMap& map, const char* x, int bytes, const Reduce& reduce, const Accumulate& accumulate, T* lo,
           T* hi, int64_t count) {
  int64_t total = 1;
  int longest = 0, separate = -1;  // the longest loop; the one with the most runs whose scales no other run has
  const auto runs = [](const Loop& l) { return (l.size + l.block - 1) / l.block; };
  for (int i = 0; i < map.count; ++i) {
    total *= map.loop[i].size;
    if (map.loop[i].size > map.loop[longest].size) longest = i;
    if (!map.loop[i].constant() && (separate < 0 || runs(map.loop[i]) > runs(map.loop[separate]))) separate = i;
  }
  constexpr int64_t kGrain = 32768;
  const int64_t threads = torch::stable::get_num_threads();
  if (total <= kGrain || threads == 1) {
    reduce_map(map, x, bytes, reduce, accumulate, lo, hi);
  } else if (separate >= 0 && (runs(map.loop[separate]) >= 4 * threads || count > kConstants)) {
    const Loop& l = map.loop[separate];
    const int64_t each = std::max<int64_t>(1, total / runs(l));
    torch::stable::parallel_for(0, runs(l), std::max<int64_t>(1, kGrain / each), [&](int64_t begin, int64_t end) {
      int64_t dx, ds;
      const ScaleMap part = slice(map, separate, begin * l.block, std::min(end * l.block, l.size), dx, ds);
      reduce_map(part, x + dx * bytes, bytes, reduce, accumulate, lo + ds, hi + ds);
    });
  } else {
    // Threads meet in the same scales: each has its own results, and they are merged.
    const Loop& l = map.loop[longest];
    const int64_t block = l.constant() ? 1 : l.block;
    const int64_t units = (l.size + block - 1) / block;
    std::mutex mutex;
    torch::stable::parallel_for(
        0, units, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, total / units)), [&](int64_t begin, int64_t end) {
          std::vector<T> own_lo(count, std::numeric_limits<T>::infinity()),
              own_hi(count, -std::numeric_limits<T>::infinity());
          int64_t dx, ds;
          const ScaleMap part = slice(map, longest, begin * block, std::min(end * block, l.size), dx, ds);
          reduce_map(part, x + dx * bytes, bytes, reduce, accumulate, own_lo.data() + ds, own_hi.data() + ds);
          const std::lock_guard<std::mutex> lock(mutex);
          for (int64_t i = 0; i < count; ++i) {
            lo[i] = own_lo[i] < lo[i] ? own_lo[i] : lo[i];
            hi[i] = own_hi[i] > hi[i] ? own_hi[i] : hi[i];
          }
        });
  }
  for (int64_t i = 0; i < count; ++i) lo[i] += T(0), hi[i] += T(0);
}

}  // namespace

DataType range_type(DataType x) { return x == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32; }

void find_range(const ScaleMap& map, const void* x, DataType x_type, bool finite, void* lo, void* hi, int64_t count) {
  const IeeeFloats ieee;
  const char* p = static_cast<const char*>(x);
  const auto start = [&](auto* l, auto* h) {
    using T = std::remove_pointer_t<decltype(l)>;
    std::fill(l, l + count, std::numeric_limits<T>::infinity());
    std::fill(h, h + count, -std::numeric_limits<T>::infinity());
  };
  bool empty = false;
  for (int i = 0; i < map.count; ++i) empty |= map.loop[i].size == 0;
  if (x_type == DataType::kFloat64) {
    auto *l = static_cast<double*>(lo), *h = static_cast<double*>(hi);
    start(l, h);
    if (empty) return;
    share(
        map, p, 8,
        [finite](const void* v, int64_t n, double* a, double* b) { DoubleRange::reduce(v, n, finite, a, b); },
        [finite](const void* v, int64_t n, double* a, double* b) { DoubleRange::accumulate(v, n, finite, a, b); }, l, h,
        count);
    return;
  }
  auto *l = static_cast<float*>(lo), *h = static_cast<float*>(hi);
  start(l, h);
  if (empty) return;
  const Input input = x_type == DataType::kFloat16    ? kF16
                      : x_type == DataType::kBFloat16 ? kBF16
                      : x_type == DataType::kInt32    ? kI32
                                                      : kF32;
  const Kernels* kernels = active_kernels() ? active_kernels() : &kBaseKernels;
  share(map, p, bits_of(x_type) / 8, kernels->reduce[input][finite], kernels->accumulate[input][finite], l, h, count);
}

}  // namespace linquant::cpu
