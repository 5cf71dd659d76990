// SPDX-License-Identifier: Apache-2.0
//
// 256 bits wide: what both variants of hosts without AVX-512 share. Included by each inside its
// unnamed namespace, after `most_rows`, how many rows its sums allow at a time; each then defines
// score_rows and add_rows.
//
// Layout. squares.h: half a square is four vectors, each with 4 coordinates of 8 tokens (keys) or 4
// tokens of 8 coordinates (values). Codes become levels in registers by byte shuffles. The unsigned
// operand of a product is the level plus 128 for keys, the weight for values.

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

constexpr int digits_of(int bits) { return bits == 8 ? 2 : 1; }

template <int kBits, int kRows>
inline void score_rows(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q,
                       const float* scales, const Ahead& ahead, float* scores);

template <int kBits, int kRows>
inline void add_rows(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                     const float* units, const Ahead& ahead, float* acc);

template <int kBits>
void key_scores(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q, int rows,
                const float* scales, const Ahead& ahead, float* scores) {
  in_blocks<most_rows(kBits)>(rows, [&](auto count, int r) {
    score_rows<kBits, count>(codes, levels, dim, q.from(r, dim), scales, r == 0 ? ahead : Ahead{},
                             scores + r * kPiece);
  });
}

template <int kBits>
void add_values(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                const float* units, int rows, const Ahead& ahead, float* acc) {
  in_blocks<most_rows(kBits)>(rows, [&](auto count, int r) {
    add_rows<kBits, count>(codes, levels, dim, weights + 2 * r * kPiece,
                           units + r * (kPiece / kGroup), r == 0 ? ahead : Ahead{},
                           acc + r * dim);
  });
}
