// The order in which floats are summed: a contract, so that gradients of scales have the same bits for every number of
// threads, vector width and device.
//
// The elements that share a scale are taken in the memory order of the result and cut into pieces of at most kSumPiece;
// a piece is summed over lanes, element i in lane i % kSumLanes, and the lanes by halves. Where every element of a row
// has a scale of its own, a piece is kSumRows rows, added one after the other. The sums of the pieces are summed in the
// same way until one is left. csrc/cpu/backward.cpp says where pieces begin.
#pragma once

#include <cstdint>

#include "core/formats.h"

namespace linquant {

inline constexpr int kSumLanes = 256;
inline constexpr int64_t kSumPiece = 2048;
inline constexpr int64_t kSumRows = 64;

// The sum of a piece of n <= kSumPiece terms.
template <class R>
LQ_INLINE R sum_piece(const R* t, int64_t n) {
  if (n == 0) return R(0);
  R lane[kSumLanes];
  int width = kSumLanes;
  if (n < kSumLanes) {
    for (width = 1; width < n;) width *= 2;
    for (int j = 0; j < width; ++j) lane[j] = j < n ? t[j] : R(0);
  } else {
    for (int j = 0; j < kSumLanes; ++j) lane[j] = t[j];
    int64_t i = kSumLanes;
    for (; i + kSumLanes <= n; i += kSumLanes)
      for (int j = 0; j < kSumLanes; ++j) lane[j] += t[i + j];
    for (int j = 0; i + j < n; ++j) lane[j] += t[i + j];
  }
  for (int w = width / 2; w > 0; w /= 2)
    for (int j = 0; j < w; ++j) lane[j] += lane[j + w];
  return lane[0];
}

// The sum of any number of terms, which are overwritten.
template <class R>
LQ_INLINE R sum_all(R* t, int64_t n) {
  while (n > 1) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < n; i += kSumPiece) t[pieces++] = sum_piece(t + i, n - i < kSumPiece ? n - i : kSumPiece);
    n = pieces;
  }
  return n == 0 ? R(0) : t[0];
}

}  // namespace linquant
