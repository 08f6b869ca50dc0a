// Walks a ScaleMap: splits it into row pieces, shares them among threads, folds scale and zero point into constants,
// and calls an engine's row kernel on each piece. Results do not depend on how it splits: every element is computed
// alone.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <new>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "core/scale_map.h"
#include "cpu/rows.h"

namespace linquant::cpu {

inline constexpr int64_t kConstants = 4096;  // folded constants that a worker holds
inline constexpr int64_t kPiece = 16384;     // elements of a piece where the constants allow it

// While it lives, this thread computes with subnormal numbers as IEEE has it. torch.set_flush_denormal(True) turns them
// off in the thread that calls it and not in the pool's: equal elements would get different codes.
class IeeeFloats {
 public:
#if defined(__x86_64__)
  IeeeFloats() : mode_(_mm_getcsr()) {
    if (mode_ & kFlush) _mm_setcsr(mode_ & ~kFlush);
  }
  ~IeeeFloats() {
    if (mode_ & kFlush) _mm_setcsr(mode_);
  }

 private:
  static constexpr unsigned kFlush = 0x8040;
  unsigned mode_;
#else
  IeeeFloats() {}
#endif
  IeeeFloats(const IeeeFloats&) = delete;
};

// A worker's object, made in memory that the thread keeps: too large for the stack of a small thread, and for a small
// call to ask for anew.
template <class T>
class ThreadLocal {
 public:
  template <class... Arguments>
  explicit ThreadLocal(const Arguments&... arguments) : object_(new (memory()) T(arguments...)) {}
  ~ThreadLocal() { object_->~T(); }
  ThreadLocal(const ThreadLocal&) = delete;
  T& operator*() const { return *object_; }
  T* operator->() const { return object_; }

 private:
  static void* memory() {
    alignas(64) static thread_local char bytes[sizeof(T)];
    return bytes;
  }
  T* object_;
};

struct GatherBuffer {
  GatherBuffer() {}  // leaves the bytes as they are
  alignas(64) char bytes[kConstants * 8];
};

// How rows are walked: the innermost loop, cut into pieces, inside all others.
struct Walk {
  Step step;
  int64_t n;       // elements of a row
  int64_t block;   // elements that share constants
  int64_t period;  // constants repeat after so many elements: rows of a few elements joined into one; n if they do not
  int64_t piece;
  int64_t pieces;  // in a row
  int64_t rows;
  int64_t grain;  // pieces that are worth a thread
  int64_t x_stride, scale_stride;
  ScaleMap outer;  // the loops around a row
};

// `any_block`: the engine takes any block length at any position, as the exact one does.
inline Walk plan_walk(const ScaleMap& map, int x_bits, int y_bits, bool any_block) {
  Walk w{};
  w.outer = map;
  Loop inner = w.outer.loop[--w.outer.count];
  const int narrow = std::min({8, x_bits, y_bits});
  const bool whole_bytes = inner.block * narrow % 8 == 0;
  if (inner.constant()) {
    w.step = kBlock;
    inner.block = inner.size;
  } else if (any_block || (inner.block >= kTile && whole_bytes)) {
    w.step = kBlock;
  } else {
    w.step = inner.block == 16 ? kBlock16 : inner.block == 32 ? kBlock32 : kElement;
  }
  w.period = inner.size;
  if (w.step == kElement && w.outer.count > 0 && inner.size <= kConstants / 8) {
    const Loop& next = w.outer.loop[w.outer.count - 1];
    if (next.constant() && next.y_stride == inner.size && next.x_stride == inner.size * inner.x_stride) {
      inner.size *= next.size;
      --w.outer.count;
    }
  }
  w.n = inner.size;
  w.block = inner.block;
  w.x_stride = inner.x_stride;
  w.scale_stride = inner.scale_stride;
  const bool gathers = w.x_stride != 1 && w.n > 1;
  if (w.period < w.n) {
    w.piece = w.period * std::max<int64_t>(1, 1024 / w.period);
  } else {
    w.piece = w.step == kElement || any_block || gathers ? kConstants : kPiece;
  }
  w.piece = std::max<int64_t>(1, std::min(w.piece, w.n));
  w.pieces = (w.n + w.piece - 1) / w.piece;
  w.rows = 1;
  for (int i = 0; i < w.outer.count; ++i) w.rows *= w.outer.loop[i].size;
  // A thread is worth waking for 128 KiB of x and y.
  w.grain = std::max<int64_t>(1, int64_t{128} * 1024 * 8 / ((x_bits + y_bits) * w.piece));
  return w;
}

// The row that the outer loops stand at, and where it lies.
class RowCursor {
 public:
  RowCursor(const ScaleMap& outer, int64_t row) : outer_(outer) {
    for (int i = outer.count; i-- > 0;) {
      index_[i] = row % outer.loop[i].size;
      row /= outer.loop[i].size;
    }
    locate();
  }
  void next() {
    for (int i = outer_.count; i-- > 0;) {
      if (++index_[i] < outer_.loop[i].size) break;
      index_[i] = 0;
    }
    locate();
  }
  int64_t x() const { return x_; }
  int64_t y() const { return y_; }
  int64_t scale() const { return scale_; }

 private:
  void locate() {
    x_ = y_ = scale_ = 0;
    for (int i = 0; i < outer_.count; ++i) {
      const Loop& l = outer_.loop[i];
      x_ += index_[i] * l.x_stride;
      y_ += index_[i] * l.y_stride;
      if (l.scale_stride != 0) scale_ += (l.block == 1 ? index_[i] : index_[i] / l.block) * l.scale_stride;
    }
  }
  const ScaleMap& outer_;
  int64_t index_[kMaxLoops] = {};
  int64_t x_ = 0, y_ = 0, scale_ = 0;
};

// Elements with a stride into a contiguous buffer.
inline void gather(const char* x, int64_t stride, int64_t n, int bytes, void* to) {
  const auto copy = [&](auto* out) {
    const auto* in = reinterpret_cast<const std::remove_pointer_t<decltype(out)>*>(x);
    for (int64_t j = 0; j < n; ++j) out[j] = in[j * stride];
  };
  if (bytes == 1) copy(static_cast<uint8_t*>(to));
  if (bytes == 2) copy(static_cast<uint16_t*>(to));
  if (bytes == 4) copy(static_cast<uint32_t*>(to));
  if (bytes == 8) copy(static_cast<uint64_t*>(to));
}

// Which folded constants a piece needs: those of `count` consecutive runs from scale number `first` on, `stride` apart,
// where the piece starts `skip` elements into the first run.
struct Runs {
  int64_t first, stride, count, skip;
  bool operator==(const Runs& o) const {
    return first == o.first && stride == o.stride && count == o.count && skip == o.skip;
  }
};

// Engine: constructed in each worker from `spec`, with
//   fold(runs, walk)            makes constants; asked for only when they change
//   row(x, y, n, skip, walk)    n elements from x to y, starting `skip` elements into the first run
template <class Engine, class Spec>
void run(const Spec& spec, const ScaleMap& map, const void* x, void* y, int x_bits, int y_bits) {
  const Walk w = plan_walk(map, x_bits, y_bits, Engine::kAnyBlock);
  const auto work = [&](int64_t begin, int64_t end) {
    const IeeeFloats ieee;
    const ThreadLocal<Engine> engine(spec);
    const ThreadLocal<GatherBuffer> buffer;
    Runs folded{-1, 0, 0, 0};
    // Pieces with the same place in their rows come together, so that constants serve many rows.
    RowCursor row(w.outer, begin % w.rows);
    for (int64_t u = begin; u < end; ++u, row.next()) {
      const int64_t start = u / w.rows * w.piece;
      const int64_t n = std::min(w.piece, w.n - start);
      const bool periodic = w.period < w.n;
      const int64_t run = periodic ? 0 : start / w.block;
      const int64_t skip = periodic ? 0 : start - run * w.block;
      const int64_t span = periodic ? w.period : n;
      const Runs runs{row.scale() + run * w.scale_stride, w.scale_stride, (skip + span + w.block - 1) / w.block, skip};
      if (!(runs == folded)) {
        engine->fold(runs, w);
        folded = runs;
      }
      const char* from = static_cast<const char*>(x) + (row.x() + start * w.x_stride) * x_bits / 8;
      char* to = static_cast<char*>(y) + (row.y() + start) * y_bits / 8;
      if (w.x_stride != 1 && n > 1) {
        gather(from, w.x_stride, n, x_bits / 8, buffer->bytes);
        from = buffer->bytes;
      }
      engine->row(from, to, n, skip, w);
    }
  };
  const int64_t units = w.rows * w.pieces;
  if (units <= w.grain) {
    work(0, units);
  } else {
    torch::stable::parallel_for(0, units, w.grain, work);
  }
}

}  // namespace linquant::cpu
