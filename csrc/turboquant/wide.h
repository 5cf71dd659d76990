// SPDX-License-Identifier: Apache-2.0
//
// 512 bits wide: attention of both AVX-512 variants. Included by each inside its unnamed namespace;
// each then defines the products declared here.
//
// Layout. squares.h: a square is four vectors of 64 levels. Codes become levels in registers by byte
// shuffles, and up to 8 query rows use them there. The unsigned operand of a product is the level
// plus 128 for keys, the weight for values.

constexpr int kLanes = 16;
constexpr int kMultiplyRows = 8;

#include "lanes.h"
#include "encode.h"
#include "store.h"
#include "squares.h"
#include "blocks.h"

// Adds the products of two squares of keys with a query's 16 digits to two sums.
inline void add_key_products(__m512i* sum, const __m512i* first, const __m512i* second,
                             const QueryDigits& query, int digit, int g);

// What a sum of key products is without the 128s that were added to the levels.
inline __m512i key_sum(__m512i sum, int32_t offset);

// Adds the products of a square of values with the weights of 16 tokens.
inline void add_value_products(__m512i& sum, const __m512i* level, const uint8_t* weights);

inline __m512i broadcast4(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

inline __m512i bytes_at(const void* p) { return _mm512_loadu_si512(p); }

inline Ints from_bytes(const uint8_t* p) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// The lowest byte of each lane.
inline void to_bytes(uint8_t* p, Ints v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
}

// The level table of one group of 16 coordinates in all quarters of a register.
template <int kBits>
inline __m512i level_table(const int8_t* levels, int g) {
  const int8_t* table = levels + (g << kBits);
  if (kBits == 4)
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  if (kBits == 3)
    return _mm512_broadcast_i32x4(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(table)));
  return __m512i{};
}

inline __m512i flip_signs(__m512i bytes) {
  return _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80));
}

// Bits shift ... of every byte, masked.
inline __m512i field(__m512i bytes, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(bytes, shift), _mm512_set1_epi8((char)mask));
}

// Bit `from` of every byte, moved to bit 2.
inline __m512i third_bit(__m512i bytes, int from) {
  const __m512i moved =
      from < 2 ? _mm512_slli_epi16(bytes, 2 - from) : _mm512_srli_epi16(bytes, from - 2);
  return _mm512_and_si512(moved, _mm512_set1_epi8(4));
}

// The levels of a square; 8-bit codes as they are.
template <int kBits>
inline void unpack(const Square& at, __m512i table, __m512i* levels) {
  if constexpr (kBits == 8) {
    for (int j = 0; j < 4; j++) levels[j] = bytes_at(at.low + j * at.stride);
  } else if constexpr (kBits == 4) {
    for (int j = 0; j < 2; j++) {
      const __m512i codes = bytes_at(at.low + j * at.stride);
      levels[2 * j] = _mm512_shuffle_epi8(table, field(codes, 0, 15));
      levels[2 * j + 1] = _mm512_shuffle_epi8(table, field(codes, 4, 15));
    }
  } else {
    const __m512i low = bytes_at(at.low);
    const __m512i high = _mm512_srl_epi16(bytes_at(at.high), _mm_cvtsi32_si128(at.bit));
    for (int j = 0; j < 4; j++)
      levels[j] = _mm512_shuffle_epi8(
          table, _mm512_or_si512(field(low, 2 * j, 3), third_bit(high, j)));
  }
}

template <int kBits, int kRows>
inline void score_rows(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q,
                       const float* scales, const Ahead& ahead, float* scores) {
  constexpr int kDigits = kBits == 8 ? 2 : 1;
  __m512i sum[kRows][kDigits][2] = {};
  for (int g = 0; g < dim / kLevelGroup; g++) {
    touch(ahead, g);
    const __m512i table = flip_signs(level_table<kBits>(levels, g));
    __m512i first[4], second[4];
    unpack<kBits>(key_square<kBits>(codes, dim, 0, g), table, first);
    unpack<kBits>(key_square<kBits>(codes, dim, 1, g), table, second);
    for (int r = 0; r < kRows; r++)
      for (int digit = 0; digit < kDigits; digit++)
        add_key_products(sum[r][digit], first, second, q.digits[r], digit, g);
  }
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++) {
      __m512i all = sum[r][0][half];
      if (kDigits == 2)
        all = _mm512_add_epi32(_mm512_slli_epi32(all, 6), sum[r][kDigits - 1][half]);
      save(scores + r * kPiece + half * 16, _mm512_cvtepi32_ps(key_sum(all, q.offsets[r])) *
                                                load(scales + half * 16) * q.unit[r]);
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

template <int kBits, int kRows>
inline void add_rows(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                     const float* units, const Ahead& ahead, float* acc) {
  constexpr int kDigits = kBits == 8 ? 2 : 1;
  for (int g = 0; g < dim / kLevelGroup; g++) {
    touch(ahead, g);
    const __m512i table = level_table<kBits>(levels, g);
    __m512i sum[kRows][kDigits] = {};
    for (int half = 0; half < 2; half++) {
      __m512i level[4];
      unpack<kBits>(value_square<kBits>(codes, dim, half, g), table, level);
      if (kBits == 8)
        for (__m512i& x : level) x = flip_signs(x);
      for (int r = 0; r < kRows; r++)
        for (int digit = 0; digit < kDigits; digit++)
          add_value_products(sum[r][digit], level, weights + (2 * r + digit) * kPiece + half * 16);
    }
    for (int r = 0; r < kRows; r++) {
      __m512i all = sum[r][0];
      if (kDigits == 2) all = _mm512_add_epi32(_mm512_slli_epi32(all, 5), sum[r][kDigits - 1]);
      float* to = acc + r * dim + g * kLevelGroup;
      save(to, load(to) + _mm512_cvtepi32_ps(all) * units[r * (kPiece / kGroup)]);
    }
  }
}

template <int kBits>
void add_values(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                const float* units, int rows, const Ahead& ahead, float* acc) {
  in_blocks<8>(rows, [&](auto count, int r) {
    add_rows<kBits, count>(codes, levels, dim, weights + 2 * r * kPiece,
                           units + r * (kPiece / kGroup), r == 0 ? ahead : Ahead{},
                           acc + r * dim);
  });
}

#include "attend.h"
