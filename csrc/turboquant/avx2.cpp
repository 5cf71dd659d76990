// SPDX-License-Identifier: Apache-2.0
//
// AVX2: dot products by the unsigned-by-signed byte multiply-add. Layout: narrow.h.
//
// Up to 4 query rows use the levels of a vector: 4 broadcast digits meet it (vpmaddubsw), the four
// vectors of half a square are added 16 bits wide, and only then widened (vpmaddwd, vpaddd). A
// broadcast serves two vectors, or four where rows are few. A pair of products is at most
// 2 * 255 * 63 = 32,130, so none saturates. The sum of four may pass 2^15 on the way, but wraps
// back: without the 128s it is at most 128 * 255 (attend.h), and lane_offsets takes them out before
// it is widened.
//
// Roofline. A 32-byte vector of 4-bit levels is 16 bytes from memory and costs 3 instructions to
// unpack, then about 3 per query row. Were it 4.5 instructions a cycle at 3.3 GHz, a core would take
// 16 / (3 + 3 rows) * 15 GB/s of codes: 27 at 2 rows, 11 at 6. Two cores share about 20 on hosts of
// this class: memory bounds 2 rows, arithmetic 6.
#include <immintrin.h>

#include <type_traits>

#include "tdsf.h"

namespace tdsf {
namespace {

constexpr int most_rows(int) { return 4; }

#include "narrow.h"

// Adds `factor` times both 16-bit halves of each 32-bit lane to `sum`.
inline __m256i widen(__m256i sum, __m256i halves, int factor) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(halves, _mm256_set1_epi16((short)factor)));
}

// sum += product, 16 bits wide. The compiler may not regroup such sums: it would keep all products
// at once, for which there are no registers.
inline void add_in_order(__m256i& sum, __m256i product) {
  sum = _mm256_add_epi16(sum, product);
  asm("" : "+x"(sum));
}

template <int kBits, int kRows>
inline void score_rows(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q,
                       const float* scales, const Ahead& ahead, float* scores) {
  constexpr int kDigits = digits_of(kBits), kVectors = kRows * kDigits <= 2 ? 4 : 2;
  const QueryDigits* rows = q.digits;
  for (int lanes = 0; lanes < kGroup; lanes += 8 * kVectors) {
    __m256i sum[kRows][kVectors] = {};
    for (int g = 0; g < dim / kLevelGroup; g++) {
      if (lanes == 0) touch(ahead, g);
      const __m256i table = flip_signs(level_table<kBits>(levels, g));
      __m256i narrow[kRows][kDigits][kVectors];
      for (int r = 0; r < kRows; r++)
        for (int digit = 0; digit < kDigits; digit++)
          for (int v = 0; v < kVectors; v++)
            narrow[r][digit][v] = broadcast4(rows[r].lane_offsets[digit] + g);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        __m256i four[kRows][kDigits];
        for (int r = 0; r < kRows; r++)
          for (int digit = 0; digit < kDigits; digit++)
            four[r][digit] = broadcast4(rows[r].at[digit] + g * kLevelGroup + 4 * j);
        for (int v = 0; v < kVectors; v++) {
          const __m256i level = unpack<kBits>(
              key_square<kBits>(codes, dim, lanes / 16 + v / 2, g), v % 2, j, table);
          for (int r = 0; r < kRows; r++)
            for (int digit = 0; digit < kDigits; digit++)
              add_in_order(narrow[r][digit][v], _mm256_maddubs_epi16(level, four[r][digit]));
        }
      }
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) {
          sum[r][v] = widen(sum[r][v], narrow[r][0][v], kDigits == 2 ? kQueryDigit : 1);
          if (kDigits == 2) sum[r][v] = widen(sum[r][v], narrow[r][kDigits - 1][v], 1);
        }
    }
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++)
        save(scores + r * kPiece + lanes + 8 * v,
             _mm256_cvtepi32_ps(sum[r][v]) * load(scales + lanes + 8 * v) * q.unit[r]);
  }
}

template <int kBits, int kRows>
inline void add_rows(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                     const float* units, const Ahead& ahead, float* acc) {
  constexpr int kDigits = digits_of(kBits);
  for (int g = 0; g < dim / kLevelGroup; g++) {
    touch(ahead, g);
    const __m256i table = level_table<kBits>(levels, g);
    __m256i sum[kRows][2] = {};
    for (int half = 0; half < 2; half++) {
      const Square square = value_square<kBits>(codes, dim, half, g);
      __m256i narrow[kRows][kDigits][2];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        __m256i level[2];
        for (int part = 0; part < 2; part++) {
          level[part] = unpack<kBits>(square, part, j, table);
          if (kBits == 8) level[part] = flip_signs(level[part]);
        }
        for (int r = 0; r < kRows; r++)
          for (int digit = 0; digit < kDigits; digit++) {
            const __m256i four =
                broadcast4(weights + (2 * r + digit) * kPiece + half * 16 + 4 * j);
            for (int part = 0; part < 2; part++) {
              __m256i& to = narrow[r][digit][part];
              const __m256i product = _mm256_maddubs_epi16(four, level[part]);
              if (j == 0)
                to = product;
              else
                add_in_order(to, product);
            }
          }
      }
      for (int r = 0; r < kRows; r++)
        for (int part = 0; part < 2; part++) {
          sum[r][part] = widen(sum[r][part], narrow[r][0][part], kDigits == 2 ? kWeightDigit : 1);
          if (kDigits == 2) sum[r][part] = widen(sum[r][part], narrow[r][kDigits - 1][part], 1);
        }
    }
    for (int r = 0; r < kRows; r++)
      for (int part = 0; part < 2; part++) {
        float* to = acc + r * dim + g * kLevelGroup + part * 8;
        save(to, load(to) + _mm256_cvtepi32_ps(sum[r][part]) * units[r * (kPiece / kGroup)]);
      }
  }
}

#include "attend.h"

}  // namespace

const Kernels kAvx2 = {"avx2", store_tokens, load_queries, attend_piece, merge, finish};

}  // namespace tdsf
