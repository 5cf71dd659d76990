// SPDX-License-Identifier: Apache-2.0
//
// AVX2: levels by 16-entry byte shuffles, dot products by the unsigned-by-signed byte multiply-add.
//
// Layout. squares.h: half a square is four vectors, each with 4 coordinates of 8 tokens (keys) or 4
// tokens of 8 coordinates (values). Codes become levels in registers, and up to 4 query rows use them
// there: 4 broadcast digits meet a vector (vpmaddubsw), the four vectors are added 16 bits wide, and
// only then widened (vpmaddwd, vpaddd). A broadcast serves two vectors, or four where rows are few.
// The unsigned operand is the level plus 128 for keys, the digit for values; a pair of products is at
// most 2 * 255 * 63 = 32,130, so none saturates. The sum of four may pass 2^15 on the way, but wraps
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

constexpr int kLanes = 8;
constexpr int kMultiplyRows = 6;

#include "lanes.h"
#include "encode.h"
#include "store.h"
#include "squares.h"
#include "blocks.h"

inline __m256i bytes_at(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

inline Ints from_bytes(const uint8_t* p) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// The lowest byte of each lane.
inline void to_bytes(uint8_t* p, Ints v) {
  const __m256i picked = _mm256_shuffle_epi8(
      (__m256i)v, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1,
                                                            -1, -1, -1, -1, -1)));
  const __m128i bytes =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
}

inline __m256i broadcast4(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}

// The level table of one group of 16 coordinates in both halves of a register.
template <int kBits>
inline __m256i level_table(const int8_t* levels, int g) {
  const int8_t* table = levels + (g << kBits);
  if (kBits == 4)
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  if (kBits == 3)
    return _mm256_broadcastsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(table)));
  return __m256i{};
}

inline __m256i flip_signs(__m256i bytes) {
  return _mm256_xor_si256(bytes, _mm256_set1_epi8((char)0x80));
}

// Bits shift ... of every byte, masked.
inline __m256i field(__m256i bytes, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8((char)mask));
}

// Bit `from` of every byte, moved to bit 2.
inline __m256i third_bit(__m256i bytes, int from) {
  const __m256i moved =
      from < 2 ? _mm256_slli_epi16(bytes, 2 - from) : _mm256_srli_epi16(bytes, from - 2);
  return _mm256_and_si256(moved, _mm256_set1_epi8(4));
}

// Vector j of the levels of lanes 8 part ... of a square; 8-bit codes as they are.
template <int kBits>
inline __m256i unpack(const Square& at, int part, int j, __m256i table) {
  const uint8_t* lines = at.low + part * 32;
  if constexpr (kBits == 8) {
    return bytes_at(lines + j * at.stride);
  } else if constexpr (kBits == 4) {
    return _mm256_shuffle_epi8(table, field(bytes_at(lines + j / 2 * at.stride), j % 2 * 4, 15));
  } else {
    const __m256i high =
        _mm256_srl_epi16(bytes_at(at.high + part * 32), _mm_cvtsi32_si128(at.bit));
    return _mm256_shuffle_epi8(
        table, _mm256_or_si256(field(bytes_at(lines), 2 * j, 3), third_bit(high, j)));
  }
}

// Adds `factor` times both 16-bit halves of each 32-bit lane to `sum`.
inline __m256i widen(__m256i sum, __m256i halves, int factor) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(halves, _mm256_set1_epi16((short)factor)));
}

constexpr int digits_of(int bits) { return bits == 8 ? 2 : 1; }

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

template <int kBits>
void key_scores(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q, int rows,
                const float* scales, const Ahead& ahead, float* scores) {
  in_blocks<4>(rows, [&](auto count, int r) {
    score_rows<kBits, count>(codes, levels, dim, q.from(r, dim), scales, r == 0 ? ahead : Ahead{},
                             scores + r * kPiece);
  });
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

template <int kBits>
void add_values(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                const float* units, int rows, const Ahead& ahead, float* acc) {
  in_blocks<4>(rows, [&](auto count, int r) {
    add_rows<kBits, count>(codes, levels, dim, weights + 2 * r * kPiece,
                           units + r * (kPiece / kGroup), r == 0 ? ahead : Ahead{},
                           acc + r * dim);
  });
}

#include "attend.h"

}  // namespace

const Kernels kAvx2 = {"avx2", store_tokens, load_queries, attend_piece, merge, finish};

}  // namespace tdsf
