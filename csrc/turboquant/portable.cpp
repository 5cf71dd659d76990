// SPDX-License-Identifier: Apache-2.0
//
// The portable variant: plain loops, any CPU. It is what tests compare the others with.
//
// Layout: docs/format.md states that of the packed codes. Roofline: none is claimed. A level costs
// a scalar table lookup, some 10 instructions, once per tile, and a multiply-add per query row that
// the compiler vectorises for the baseline instruction set: bound by arithmetic, far from memory.
#include <type_traits>

#include "tdsf.h"

namespace tdsf {
namespace {

constexpr int kLanes = 4;
constexpr int kMultiplyRows = 2;

#include "lanes.h"
#include "encode.h"
#include "store.h"
#include "squares.h"
#include "blocks.h"

inline Ints from_bytes(const uint8_t* p) {
  Ints v;
  for (int i = 0; i < kLanes; i++) v[i] = p[i];
  return v;
}

// The lowest byte of each lane.
inline void to_bytes(uint8_t* p, Ints v) {
  for (int i = 0; i < kLanes; i++) p[i] = (uint8_t)v[i];
}

// The signed levels of a square, [4 vectors][16 lanes][4].
template <int kBits>
inline void unpack(const Square& at, const int8_t* table, int8_t* levels) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 64; i++) {
      int8_t& level = levels[j * 64 + i];
      if (kBits == 8) {
        level = (int8_t)(at.low[j * at.stride + i] - 128);
      } else if (kBits == 4) {
        level = table[at.low[j / 2 * at.stride + i] >> j % 2 * 4 & 15];
      } else {
        const int high = at.high[i] >> (at.bit + j) & 1;
        level = table[(at.low[i] >> 2 * j & 3) | high << 2];
      }
    }
}

inline const int8_t* level_table(const int8_t* levels, int bits, int g) {
  return bits == 8 ? nullptr : levels + (g << bits);
}

// Adds a square's products with 16 digits, times `factor`, to the sums of its 16 lanes.
inline void add_products(const int8_t* levels, const int8_t* digits, int factor, int32_t* sums) {
  int32_t products[16] = {};
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 64; i++)
      products[i / 4] += (int16_t)levels[j * 64 + i] * (int16_t)digits[4 * j + i % 4];
  for (int lane = 0; lane < 16; lane++) sums[lane] += products[lane] * factor;
}

template <int kBits>
void key_scores(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q, int rows,
                const float* scales, const Ahead&, float* scores) {
  for (int half = 0; half < 2; half++) {
    int32_t sums[kTileRows][16] = {};
    for (int g = 0; g < dim / kLevelGroup; g++) {
      int8_t square[256];
      unpack<kBits>(key_square<kBits>(codes, dim, half, g), level_table(levels, kBits, g), square);
      for (int r = 0; r < rows; r++) {
        const auto& digits = q.digits[r].at;
        add_products(square, digits[0] + g * kLevelGroup, kBits == 8 ? kQueryDigit : 1, sums[r]);
        if (kBits == 8) add_products(square, digits[1] + g * kLevelGroup, 1, sums[r]);
      }
    }
    for (int r = 0; r < rows; r++)
      for (int lane = 0; lane < 16; lane++) {
        const int t = half * 16 + lane;
        scores[r * kPiece + t] = (float)sums[r][lane] * scales[t] * q.unit[r];
      }
  }
}

template <int kBits>
void add_values(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                const float* units, int rows, const Ahead&, float* acc) {
  for (int g = 0; g < dim / kLevelGroup; g++) {
    int8_t squares[2][256];
    for (int half = 0; half < 2; half++)
      unpack<kBits>(value_square<kBits>(codes, dim, half, g), level_table(levels, kBits, g),
                    squares[half]);
    for (int r = 0; r < rows; r++) {
      // A weight's digit is at most 127, so it is the same number when signed.
      const int8_t* digits = reinterpret_cast<const int8_t*>(weights) + 2 * r * kPiece;
      int32_t sums[16] = {};
      for (int half = 0; half < 2; half++) {
        add_products(squares[half], digits + half * 16, kBits == 8 ? kWeightDigit : 1, sums);
        if (kBits == 8) add_products(squares[half], digits + kPiece + half * 16, 1, sums);
      }
      float* to = acc + r * dim + g * kLevelGroup;
      for (int lane = 0; lane < 16; lane++)
        to[lane] += (float)sums[lane] * units[r * (kPiece / kGroup)];
    }
  }
}

#include "attend.h"

}  // namespace

const Kernels kPortable = {"portable", store_tokens, load_queries, attend_piece, merge, finish};

}  // namespace tdsf
