// Which scale an element uses, for every granularity, in one form that CPU and CUDA share.
//
// A ScaleMap is a nest of loops over x. In each loop, runs of `block` iterations share a scale; from one run to the
// next the scale moves on by `scale_stride`. So element (i0, i1, ...) has the scale number
//
//     sum over loops of (i / block) * scale_stride
//
//   per tensor                one loop, block = size
//   per axis of [O, C, I]     loops O (block = size) and C*I (block I, stride 1)
//   last axis of [O, C]       loops O (block = size) and C (block 1, stride 1)
//   blocks of B on [O, D, I]  loops O*D (block B, stride I) and I (block 1, stride 1); B need not divide D
//   128 x 128 blocks          loops of both dimensions, block 128 each
//
// `coalesce` merges neighbouring loops wherever one loop can say the same, which is what makes rows long. A short last
// block needs no special case: it is a run that the loop's end cuts off.
#pragma once

#include <cstdint>

namespace linquant {

struct Loop {
  int64_t size;
  int64_t block;         // >= 1; one run for the whole loop when block >= size
  int64_t x_stride;      // in elements; for packed codes in codes, rows padded to whole bytes
  int64_t y_stride;      // likewise
  int64_t scale_stride;  // 0 where the whole loop shares a scale

  bool constant() const { return scale_stride == 0 || block >= size; }
};

inline constexpr int kMaxLoops = 16;

struct ScaleMap {
  int count = 0;
  Loop loop[kMaxLoops];  // outermost first; y's memory order, so the last one has y_stride 1

  // Puts `inner` inside what is there, merged into the innermost loop where that says the same. False: no room.
  bool push(Loop inner) {
    if (inner.size == 1) return true;
    if (inner.constant()) inner.block = inner.size, inner.scale_stride = 0;
    if (count > 0) {
      Loop& outer = loop[count - 1];
      const bool adjacent =
          outer.x_stride == inner.x_stride * inner.size && outer.y_stride == inner.y_stride * inner.size;
      const bool constant = inner.constant();
      const bool whole_blocks = outer.block == 1 && inner.size % inner.block == 0 &&
                                outer.scale_stride == inner.scale_stride * (inner.size / inner.block);
      if (adjacent && (constant || whole_blocks)) {
        outer.block = constant ? outer.block * inner.size : inner.block;
        outer.scale_stride = constant ? outer.scale_stride : inner.scale_stride;
        outer.size *= inner.size;
        outer.x_stride = inner.x_stride;
        outer.y_stride = inner.y_stride;
        return true;
      }
    }
    if (count == kMaxLoops) return false;
    loop[count++] = inner;
    return true;
  }
};

}  // namespace linquant
