#include "cpu/range.h"

#include <atomic>
#include <bit>
#include <limits>
#include <mutex>
#include <vector>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

constexpr int64_t kGrain = 32768;            // elements that are worth a thread
constexpr int64_t kOwnBytes = 1024 * 1024;   // of a thread's own counters
constexpr int64_t kColumn = 256;             // elements of a column that are counted at a time
constexpr uint32_t kMostPending = 1u << 31;  // elements that 32-bit counters take

// Collectors: what a walk over x fills for each scale number. `lo`, `hi` and the rest point at scale number 0.

struct DoubleRange {
  using T = double;
  double *lo, *hi;
  bool finite;
  int64_t nonfinite = 0;

  int bytes() const { return 8; }         // of an element of x
  int loaded_bytes() const { return 8; }  // of one that load() has written
  void load(const char* x, int64_t stride, int64_t n, void* to) const { gather(x, stride, n, 8, to); }
  bool by_columns() const { return false; }
  int64_t most_own() const { return kConstants; }
  bool prefers_own(int64_t) const { return false; }
  void move(int64_t scale) { lo += scale, hi += scale; }
  void start_own(int64_t) {}
  void finish_own(int64_t) {}

  void reduce(const void* x, int64_t n, int64_t scale) {
    const auto* p = static_cast<const double*>(x);
    for (int64_t j = 0; j < n; ++j) take(p[j], lo + scale, hi + scale);
  }
  void accumulate(const void* x, int64_t n, int64_t scale) {
    const auto* p = static_cast<const double*>(x);
    for (int64_t j = 0; j < n; ++j) take(p[j], lo + scale + j, hi + scale + j);
  }

 private:
  void take(double v, double* l, double* h) const {
    if (finite) v += v * 0.0;  // infinities become NaN, which no comparison takes
    *l = v < *l ? v : *l;
    *h = v > *h ? v : *h;
  }
};

// Of x as float32; with a histogram where `counts` is not null.
struct FloatRange {
  using T = float;
  float *lo, *hi;
  const Kernels* kernels;
  DataType type;  // of x
  Infinities infinities;
  int64_t* counts = nullptr;
  int64_t bins = 0;
  int64_t nonfinite = 0;
  // Between start_own() and finish_own(): counters by kCopies, how many elements are in them; or the shared counters.
  uint32_t* copies = nullptr;
  int64_t pending = 0;
  int64_t* shared = nullptr;

  int bytes() const { return bits_of(type) / 8; }
  int loaded_bytes() const { return std::min(bytes(), 4); }
  void load(const char* x, int64_t stride, int64_t n, void* to) const {
    if (type != DataType::kFloat64) return gather(x, stride, n, bytes(), to);
    const auto* in = reinterpret_cast<const double*>(x);
    for (int64_t j = 0; j < n; ++j) static_cast<float*>(to)[j] = static_cast<float>(in[j * stride]);
  }
  bool by_columns() const { return counts; }  // counters of many slices at once would push each other out of the cache
  int64_t most_own() const { return counts ? kOwnBytes / 8 / bins : kConstants; }
  bool prefers_own(int64_t count) const { return counts && count == 1; }
  void move(int64_t scale) {
    lo += scale, hi += scale;
    if (counts) counts += scale * bins;
  }

  // Counters of this thread, until finish_own() adds them to those that all share.
  void start_own(int64_t count) {
    if (!counts) return;
    static thread_local std::vector<char> memory;
    const size_t bytes = static_cast<size_t>(bins) * (count == 1 ? kCopies * sizeof(uint32_t) : count * 8);
    if (memory.size() < bytes) memory.resize(bytes);
    std::fill_n(memory.data(), bytes, 0);
    if (count == 1) {
      copies = reinterpret_cast<uint32_t*>(memory.data());
    } else {
      shared = counts;
      counts = reinterpret_cast<int64_t*>(memory.data());
    }
  }
  void finish_own(int64_t count) {
    if (copies) flush();
    for (int64_t i = 0; shared && i < count * bins; ++i)
      if (counts[i] != 0) add(shared + i, counts[i]);
  }

  void reduce(const void* xv, int64_t n, int64_t scale) {
    const auto* x = static_cast<const char*>(xv);
    if (!counts) {
      kernels->reduce[input()][infinities](x, n, lo + scale, hi + scale, &nonfinite);
    } else if (!copies) {
      int64_t* to = counts + scale * bins;
      nonfinite -= to[infinite()];
      kernels->count[input()](x, n, shift(), to, lo + scale, hi + scale);
      nonfinite += to[infinite()];
    } else {
      for (int64_t i = 0; i < n; i += kMostPending / 2) {
        const int64_t some = std::min<int64_t>(n - i, kMostPending / 2);
        if (pending + some > kMostPending) flush();
        kernels->count_copies[input()](x + i * loaded_bytes(), some, shift(), copies, lo, hi);
        pending += some;
      }
    }
  }
  void accumulate(const void* x, int64_t n, int64_t scale) {
    if (!counts) kernels->accumulate[input()][infinities](x, n, lo + scale, hi + scale, &nonfinite);
    for (int64_t i = 0; counts && i < n; ++i) reduce(static_cast<const char*>(x) + i * loaded_bytes(), 1, scale + i);
  }

 private:
  Input input() const {
    switch (type) {
      case DataType::kFloat16:
        return kF16;
      case DataType::kBFloat16:
        return kBF16;
      case DataType::kInt32:
        return kI32;
      default:
        return kF32;
    }
  }
  int shift() const { return 32 - std::countr_zero(static_cast<uint64_t>(bins)); }
  int64_t infinite() const { return 0x7f800000 >> shift(); }  // the bin of all that is not finite
  static void add(int64_t* to, int64_t n) { std::atomic_ref(*to).fetch_add(n, std::memory_order_relaxed); }
  void flush() {
    for (int64_t i = 0; i < bins; ++i) {
      uint64_t sum = 0;
      for (int c = 0; c < kCopies; ++c) sum += copies[i * kCopies + c];
      if (i == infinite()) nonfinite += static_cast<int64_t>(sum);
      if (sum != 0) add(counts + i, static_cast<int64_t>(sum));
    }
    std::fill_n(copies, bins * kCopies, 0);
    pending = 0;
  }
};

// The iterations [begin, end) of one loop; begin is at the start of a run.
ScaleMap slice(const ScaleMap& map, int loop, int64_t begin, int64_t end, int64_t& x_offset, int64_t& scale_offset) {
  ScaleMap s = map;
  Loop& l = s.loop[loop];
  l.size = end - begin;
  x_offset = begin * l.x_stride;
  scale_offset = map.loop[loop].constant() ? 0 : begin / l.block * l.scale_stride;
  return s;
}

// One slice of the work, by one thread.
template <class Collector>
void collect(const ScaleMap& map, const char* x, Collector& to) {
  ScaleMap outer = map;
  const Loop inner = outer.loop[--outer.count];
  const bool each = !inner.constant() && inner.block == 1 && inner.scale_stride == 1;
  if (each && to.by_columns() && outer.count > 0) {
    const Loop& next = outer.loop[outer.count - 1];
    const int64_t some = next.constant() ? kColumn : next.block;
    for (int64_t begin = 0; begin < next.size; begin += some) {
      int64_t dx, ds;
      ScaleMap part = slice(map, outer.count - 1, begin, std::min(begin + some, next.size), dx, ds);
      std::swap(part.loop[outer.count - 1], part.loop[outer.count]);
      to.move(ds);
      collect(part, x + dx * to.bytes(), to);
      to.move(-ds);
    }
    return;
  }
  int64_t rows = 1;
  for (int i = 0; i < outer.count; ++i) rows *= outer.loop[i].size;
  const IeeeFloats ieee;
  const ThreadLocal<GatherBuffer> buffer;
  const bool gathers = (inner.x_stride != 1 && inner.size > 1) || to.loaded_bytes() != to.bytes();
  const int64_t piece = gathers ? kConstants : inner.size;
  RowCursor row(outer, 0);
  for (int64_t r = 0; r < rows; ++r, row.next()) {
    for (int64_t start = 0; start < inner.size; start += piece) {
      const int64_t n = std::min(piece, inner.size - start);
      const char* from = x + (row.x() + start * inner.x_stride) * to.bytes();
      if (gathers) {
        to.load(from, inner.x_stride, n, buffer->bytes);
        from = buffer->bytes;
      }
      if (inner.constant()) {
        to.reduce(from, n, row.scale());
      } else if (each) {
        to.accumulate(from, n, row.scale() + start);
      } else {
        for (int64_t j = 0; j < n;) {
          const int64_t run = (start + j) / inner.block, end = std::min(n, (run + 1) * inner.block - start);
          to.reduce(from + j * to.loaded_bytes(), end - j, row.scale() + run * inner.scale_stride);
          j = end;
        }
      }
    }
  }
}

// All of the work, shared among threads.
template <class Collector>
void share(const ScaleMap& map, const char* x, Collector& to, int64_t count) {
  using T = typename Collector::T;
  int64_t total = 1;
  int longest = 0, separate = -1;  // the longest loop; the one with the most runs whose scales no other run has
  const auto runs = [](const Loop& l) { return (l.size + l.block - 1) / l.block; };
  for (int i = 0; i < map.count; ++i) {
    total *= map.loop[i].size;
    if (map.loop[i].size > map.loop[longest].size) longest = i;
    if (!map.loop[i].constant() && (separate < 0 || runs(map.loop[i]) > runs(map.loop[separate]))) separate = i;
  }
  if (total == 0) return;
  const IeeeFloats ieee;
  const int64_t threads = torch::stable::get_num_threads();
  std::mutex mutex;
  if (total <= kGrain || (threads == 1 && !to.prefers_own(count))) {
    collect(map, x, to);
  } else if (separate >= 0 && (runs(map.loop[separate]) >= 4 * threads || count > to.most_own())) {
    const Loop& l = map.loop[separate];
    const int64_t each = std::max<int64_t>(1, total / runs(l));
    torch::stable::parallel_for(0, runs(l), std::max<int64_t>(1, kGrain / each), [&](int64_t begin, int64_t end) {
      int64_t dx, ds;
      const ScaleMap part = slice(map, separate, begin * l.block, std::min(end * l.block, l.size), dx, ds);
      Collector own = to;
      own.nonfinite = 0;
      own.move(ds);
      collect(part, x + dx * to.bytes(), own);
      const std::lock_guard<std::mutex> lock(mutex);
      to.nonfinite += own.nonfinite;
    });
  } else {
    // Threads meet in the same scales: each has its own results, and they are merged.
    const Loop& l = map.loop[longest];
    const int64_t block = l.constant() ? 1 : l.block;
    const int64_t units = (l.size + block - 1) / block;
    torch::stable::parallel_for(
        0, units, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, total / units)), [&](int64_t begin, int64_t end) {
          std::vector<T> lo(count, std::numeric_limits<T>::infinity()), hi(count, -std::numeric_limits<T>::infinity());
          int64_t dx, ds;
          const ScaleMap part = slice(map, longest, begin * block, std::min(end * block, l.size), dx, ds);
          Collector own = to;
          own.nonfinite = 0;
          own.lo = lo.data();
          own.hi = hi.data();
          own.start_own(count);
          const int64_t first = ds;
          own.move(first);
          collect(part, x + dx * to.bytes(), own);
          own.move(-first);
          own.finish_own(count);
          const std::lock_guard<std::mutex> lock(mutex);
          to.nonfinite += own.nonfinite;
          for (int64_t i = 0; i < count; ++i) {
            to.lo[i] = lo[i] < to.lo[i] ? lo[i] : to.lo[i];
            to.hi[i] = hi[i] > to.hi[i] ? hi[i] : to.hi[i];
          }
        });
  }
  for (int64_t i = 0; i < count; ++i) to.lo[i] += T(0), to.hi[i] += T(0);
}

const Kernels* range_kernels() { return active_kernels() ? active_kernels() : &kBaseKernels; }

}  // namespace

DataType range_type(DataType x) { return x == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32; }

void find_range(const ScaleMap& map, const void* x, DataType x_type, bool finite, void* lo, void* hi, int64_t count) {
  const auto fill = [&](auto collector) {
    using T = typename decltype(collector)::T;
    std::fill_n(collector.lo, count, std::numeric_limits<T>::infinity());
    std::fill_n(collector.hi, count, -std::numeric_limits<T>::infinity());
    share(map, static_cast<const char*>(x), collector, count);
  };
  if (x_type == DataType::kFloat64) {
    fill(DoubleRange{static_cast<double*>(lo), static_cast<double*>(hi), finite});
  } else {
    fill(FloatRange{static_cast<float*>(lo), static_cast<float*>(hi), range_kernels(), x_type,
                    finite ? kLeftOut : kKept});
  }
}

void observe(const ScaleMap& map, const void* x, DataType x_type, const Statistics& s) {
  FloatRange collector{s.lo, s.hi, range_kernels(), x_type, kCounted};
  collector.counts = s.counts;
  collector.bins = s.bins;
  share(map, static_cast<const char*>(x), collector, s.count);
  *s.nonfinite += collector.nonfinite;
}

}  // namespace linquant::cpu
