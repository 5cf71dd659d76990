// SPDX-License-Identifier: Apache-2.0
//
// NEON with the dot-product extension (Armv8.2): levels by byte table look-ups, dot products by sdot.
//
// Layout. squares.h: a quarter of a square is four vectors, each with 4 coordinates of 4 tokens
// (keys) or 4 tokens of 4 coordinates (values). sdot multiplies signed bytes (levels and digits as
// they are; a weight's digit is at most 127) and adds the four products of each 32-bit lane to its
// sum. It can take its second operand from one lane of a register, so 16 digits are loaded once and
// meet the four vectors without a broadcast.
//
// Roofline, by counts of instructions: no such host has been measured. 16 bytes of 4-bit codes become
// two vectors of levels by 4 instructions, and meet a query row by 2 (keys) or 3 (values, whose sums
// end after 32 tokens). A core that starts two vector instructions a cycle, as Neoverse N1 at 2.5 GHz,
// takes 16 / (2 + 1.25 rows) bytes of codes a cycle: 9 GB/s at 2 rows, 4 at 6. Where 64 such cores
// share 200 GB/s, 3 each, memory bounds decode up to 8 rows; a core that has it alone is bound by
// arithmetic.
#include <arm_neon.h>

#include <type_traits>

#include "tdsf.h"

namespace tdsf {
namespace {

constexpr int kLanes = 4;
constexpr int kMultiplyRows = 4;

#include "lanes.h"
#include "encode.h"
#include "store.h"
#include "squares.h"
#include "blocks.h"

inline uint8x16_t bytes_at(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }

inline int8x16_t digits_at(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }

inline Ints from_bytes(const uint8_t* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, 4);
  return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(x))));
}

// The lowest byte of each lane.
inline void to_bytes(uint8_t* p, Ints v) {
  const uint16x4_t halves = vmovn_u32((uint32x4_t)v);
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
  __builtin_memcpy(p, &bytes, 4);
}

// The level table of one group of 16 coordinates; at 3 bits in both halves of a register.
template <int kBits>
inline int8x16_t level_table(const int8_t* levels, int g) {
  const int8_t* table = levels + (g << kBits);
  if (kBits == 4) return vld1q_s8(table);
  if (kBits == 3) return vcombine_s8(vld1_s8(table), vld1_s8(table));
  return int8x16_t{};
}

// Bit `from` of every byte, moved to bit 2.
inline uint8x16_t third_bit(uint8x16_t bytes, int from) {
  return (from < 2 ? bytes << (2 - from) : bytes >> (from - 2)) & 4;
}

// The levels of lanes 4 part ... of a square.
template <int kBits>
inline void unpack(const Square& at, int part, int8x16_t table, int8x16_t* levels) {
  const uint8_t* lines = at.low + part * 16;
  if constexpr (kBits == 8) {
    for (int j = 0; j < 4; j++) levels[j] = (int8x16_t)(bytes_at(lines + j * at.stride) ^ 0x80);
  } else if constexpr (kBits == 4) {
    for (int j = 0; j < 2; j++) {
      const uint8x16_t codes = bytes_at(lines + j * at.stride);
      levels[2 * j] = vqtbl1q_s8(table, codes & 15);
      levels[2 * j + 1] = vqtbl1q_s8(table, codes >> 4);
    }
  } else {
    const uint8x16_t low = bytes_at(lines);
    const uint8x16_t high = bytes_at(at.high + part * 16) >> (uint8_t)at.bit;
    for (int j = 0; j < 4; j++)
      levels[j] = vqtbl1q_s8(table, (low >> 2 * j & 3) | third_bit(high, j));
  }
}

// Adds a quarter square's products with 16 digits to the sums of its 4 lanes.
inline int32x4_t add_products(int32x4_t sum, const int8x16_t* levels, int8x16_t digits) {
  sum = vdotq_laneq_s32(sum, levels[0], digits, 0);
  sum = vdotq_laneq_s32(sum, levels[1], digits, 1);
  sum = vdotq_laneq_s32(sum, levels[2], digits, 2);
  return vdotq_laneq_s32(sum, levels[3], digits, 3);
}

inline Floats to_floats(int32x4_t v) { return (Floats)vcvtq_f32_s32(v); }

constexpr int kParts = 2;  // quarters of a square that one load of digits serves

template <int kBits, int kRows>
inline void score_rows(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q,
                       const float* scales, const Ahead& ahead, float* scores) {
  constexpr int kDigits = kBits == 8 ? 2 : 1;
  for (int lanes = 0; lanes < kGroup; lanes += kParts * kLanes) {
    int32x4_t sum[kRows][kDigits][kParts] = {};
    for (int g = 0; g < dim / kLevelGroup; g++) {
      if (lanes == 0) touch(ahead, g);
      const int8x16_t table = level_table<kBits>(levels, g);
      int8x16_t level[kParts][4];
      for (int part = 0; part < kParts; part++)
        unpack<kBits>(key_square<kBits>(codes, dim, lanes / 16, g), lanes % 16 / kLanes + part,
                      table, level[part]);
      for (int r = 0; r < kRows; r++)
        for (int digit = 0; digit < kDigits; digit++) {
          const int8x16_t digits = digits_at(q.digits[r].at[digit] + g * kLevelGroup);
          for (int part = 0; part < kParts; part++)
            sum[r][digit][part] = add_products(sum[r][digit][part], level[part], digits);
        }
    }
    for (int r = 0; r < kRows; r++)
      for (int part = 0; part < kParts; part++) {
        int32x4_t all = sum[r][0][part];
        if (kDigits == 2) all = all * kQueryDigit + sum[r][kDigits - 1][part];
        const int t = lanes + part * kLanes;
        save(scores + r * kPiece + t, to_floats(all) * load(scales + t) * q.unit[r]);
      }
  }
}

template <int kBits>
void key_scores(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q, int rows,
                const float* scales, const Ahead& ahead, float* scores) {
  in_blocks<kBits == 8 ? 4 : 8>(rows, [&](auto count, int r) {
    score_rows<kBits, count>(codes, levels, dim, q.from(r, dim), scales, r == 0 ? ahead : Ahead{},
                             scores + r * kPiece);
  });
}

// The levels of 32 tokens by 4 kParts coordinates stay in registers for all rows.
template <int kBits>
void add_values(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                const float* units, int rows, const Ahead& ahead, float* acc) {
  constexpr int kDigits = kBits == 8 ? 2 : 1;
  for (int g = 0; g < dim / kLevelGroup; g++) {
    touch(ahead, g);
    const int8x16_t table = level_table<kBits>(levels, g);
    for (int first = 0; first < 4; first += kParts) {
      int8x16_t level[2][kParts][4];
      for (int half = 0; half < 2; half++)
        for (int part = 0; part < kParts; part++)
          unpack<kBits>(value_square<kBits>(codes, dim, half, g), first + part, table,
                        level[half][part]);
      for (int r = 0; r < rows; r++) {
        int32x4_t sum[kParts] = {};
        for (int digit = 0; digit < kDigits; digit++)
          for (int part = 0; part < kParts; part++) {
            if (digit == 1) sum[part] *= kWeightDigit;
            for (int half = 0; half < 2; half++)
              sum[part] = add_products(
                  sum[part], level[half][part],
                  digits_at(weights + (2 * r + digit) * kPiece + half * 16));
          }
        for (int part = 0; part < kParts; part++) {
          float* to = acc + r * dim + g * kLevelGroup + (first + part) * kLanes;
          save(to, load(to) + to_floats(sum[part]) * units[r * (kPiece / kGroup)]);
        }
      }
    }
  }
}

#include "attend.h"

}  // namespace

const Kernels kNeon = {"neon", store_tokens, load_queries, attend_piece, merge, finish};

}  // namespace tdsf
