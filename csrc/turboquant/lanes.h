// SPDX-License-Identifier: Apache-2.0
//
// Vector arithmetic in the compiler's own vector types, kLanes floats wide. A variant defines
// kLanes before it includes this file inside its unnamed namespace, so no symbol is shared between
// files built for different instruction sets (the linker would keep just one of them).
//
// Everything is elementwise except fold(), whose association is the same for every kLanes.

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Unsigned = uint32_t __attribute__((vector_size(4 * kLanes)));

constexpr int kStrided = 16;              // strided partial sums of a reduction
constexpr int kPerFold = kStrided / kLanes;  // vectors that hold them

inline Floats load(const float* p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline void save(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof v); }
inline Floats splat(float x) { return x - Floats{}; }
inline Ints as_ints(Floats v) { return (Ints)v; }
inline Floats as_floats(Ints v) { return (Floats)v; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats magnitude(Floats v) { return as_floats(as_ints(v) & 0x7fffffff); }

// Nearest integer, ties to even; exact for magnitudes below 2^22. The sum holds the integer in its
// low bits as well.
constexpr float kRound = 12582912.0f;

inline Floats nearest(Floats v) { return (v + kRound) - kRound; }

// table[index], of 16 entries.
inline Floats look_up(const float* table, Ints index) {
  if constexpr (kLanes == 16) return __builtin_shuffle(load(table), index);
  if constexpr (kLanes == 8) return __builtin_shuffle(load(table), load(table + 8), index);
  Floats found;
  for (int i = 0; i < kLanes; i++) found[i] = table[index[i]];
  return found;
}

// table[index], of 8 entries.
inline Floats look_up_8(const float* table, Ints index) {
  if constexpr (kLanes == 8) return __builtin_shuffle(load(table), index);
  return look_up(table, index);
}

using Bytes = uint8_t __attribute__((vector_size(kLanes)));

// Integers from 0 to 255 as bytes.
inline void narrow(Ints v, uint8_t* bytes) {
  const Bytes b = __builtin_convertvector(v, Bytes);
  __builtin_memcpy(bytes, &b, sizeof b);
}

// 2^x for x <= 127, zero below -126; relative error under 2e-7. The polynomial is the one of degree 5
// that is exact at 0 and has the least relative error on [-1/2, 1/2].
inline Floats power_of_two(Floats x) {
  const Floats rounded = x + kRound;
  const Floats r = x - (rounded - kRound);
  Floats p = splat(1.32647271e-3f);
  p = p * r + 9.67151265e-3f;
  p = p * r + 5.55073374e-2f;
  p = p * r + 2.40222421e-1f;
  p = p * r + 6.93146978e-1f;
  p = p * r + 1.0f;
  // Unsigned: where x is too small the sum wraps, and is not taken.
  const Floats scaled = (Floats)((Unsigned)p + ((Unsigned)rounded << 23));
  return x >= -126.0f ? scaled : Floats{};
}

inline float power_of_two(float x) { return power_of_two(splat(x))[0]; }

constexpr float kOctavesPerNat = 1.44269504f;

// 16 strided partial results (element i in strand i % 16).
struct Strands {
  Floats v[kPerFold];
};

// Lane i meets lane i ^ kDistance.
template <int kDistance>
inline Floats partner(Floats v) {
  Ints from;
  for (int i = 0; i < kLanes; i++) from[i] = i ^ kDistance;
  return __builtin_shuffle(v, from);
}

// Strand i meets strand i + 8, then i + 4, i + 2, i + 1. All lanes hold the result.
template <class F>
inline Floats fold_lanes(Strands s, F combine) {
  for (int width = kPerFold / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) s.v[i] = combine(s.v[i], s.v[i + width]);
  Floats v = s.v[0];
  if constexpr (kLanes > 8) v = combine(v, partner<8>(v));
  if constexpr (kLanes > 4) v = combine(v, partner<4>(v));
  v = combine(v, partner<2>(v));
  return combine(v, partner<1>(v));
}

template <class F>
inline float fold(const Strands& s, F combine) {
  return fold_lanes(s, combine)[0];
}

inline float fold_sum(const Strands& s) {
  return fold(s, [](Floats a, Floats b) { return a + b; });
}

inline float fold_max(const Strands& s) { return fold(s, larger); }

// Sum of a[i] * b[i]; n is a multiple of 16.
inline float dot(const float* a, const float* b, int n) {
  Strands s{};
  for (int i = 0; i < n; i += kStrided)
    for (int k = 0; k < kPerFold; k++)
      s.v[k] += load(a + i + k * kLanes) * load(b + i + k * kLanes);
  return fold_sum(s);
}

inline float max_magnitude(const float* a, int n) {
  Strands s{};
  for (int i = 0; i < n; i += kStrided)
    for (int k = 0; k < kPerFold; k++)
      s.v[k] = larger(magnitude(load(a + i + k * kLanes)), s.v[k]);
  return fold_max(s);
}

inline bool all_finite(const float* a, int n) {
  for (int i = 0; i < n; i++) {
    uint32_t bits;
    __builtin_memcpy(&bits, a + i, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return false;
  }
  return true;
}

// Inlined by force: GCC takes a function that only prefetches for one without effect, and drops the
// call.
[[gnu::always_inline]] inline void touch(const Ahead& ahead, int step) {
  const uint8_t* low = ahead.low + step * ahead.low_step;
  for (int at = 0; at < ahead.low_step; at += 64) __builtin_prefetch(low + at, 0, 2);
  if (ahead.high) __builtin_prefetch(ahead.high + step * 64, 0, 2);
}

// ---- products with a head's matrix -----------------------------------------------------------

constexpr int kColumns = 16;  // columns of the matrix that one visit to a sum adds

template <int kRows>
inline void multiply_block(const float* x, const float* matrix, int dim, float* y) {
  for (int i = 0; i < dim; i += kColumns)
    for (int j = 0; j < dim; j += kStrided) {
      const float* m = matrix + (size_t)i * dim + j;
      Floats sum[kRows][kPerFold] = {};
      if (i > 0)
        for (int r = 0; r < kRows; r++)
          for (int v = 0; v < kPerFold; v++) sum[r][v] = load(y + r * dim + j + v * kLanes);
      for (int k = 0; k < kColumns; k++)
        for (int v = 0; v < kPerFold; v++) {
          const Floats column = load(m + k * dim + v * kLanes);
          for (int r = 0; r < kRows; r++) sum[r][v] += x[r * dim + i + k] * column;
        }
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kPerFold; v++) save(y + r * dim + j + v * kLanes, sum[r][v]);
    }
}

// kMultiplyRows rows at once, then the remainder in one block of its size.
template <int kRows>
inline void multiply_rows(const float* x, int rows, const float* matrix, int dim, float* y) {
  for (; rows >= kRows; rows -= kRows, x += kRows * dim, y += kRows * dim)
    multiply_block<kRows>(x, matrix, dim, y);
  if constexpr (kRows > 1)
    if (rows > 0) multiply_rows<kRows - 1>(x, rows, matrix, dim, y);
}

// y[r] = matrix x[r] for `rows` vectors; the matrix is column after column. Each output is one sum
// in the order of the inputs, whatever the number of rows. A block of rows reads the whole matrix:
// that streams from the second-level cache, where all rows at once would not fit the first.
inline void multiply(const float* x, int rows, const float* matrix, int dim, float* y) {
  multiply_rows<kMultiplyRows>(x, rows, matrix, dim, y);
}

// ---- 16-bit floating point ---------------------------------------------------------------------

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  float value;
  if (rest >= 0x7c00u) {  // Inf, NaN
    const uint32_t bits = 0x7f800000u | (rest & 0x3ffu) << 13 | sign;
    __builtin_memcpy(&value, &bits, 4);
    return value;
  }
  const uint32_t bits = rest << 13;  // scaled by 2^-112, denormals included
  __builtin_memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  return sign ? -value : value;
}

inline uint16_t float_to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint16_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds past 65504
  if (bits < 0x38800000u) {  // denormal: the addition rounds at 2^-24
    float value;
    __builtin_memcpy(&value, &bits, 4);
    value += 0.5f;
    __builtin_memcpy(&bits, &value, 4);
    return sign | (uint16_t)(bits - 0x3f000000u);
  }
  bits += 0xfffu + ((bits >> 13) & 1u);  // to nearest, ties to even
  return sign | (uint16_t)((bits - 0x38000000u) >> 13);
}

inline uint16_t float_to_bfloat(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

inline void* element(const Activations& a, int64_t token, int head) {
  const int64_t index = token * a.token_stride + head * a.head_stride;
  return static_cast<char*>(a.data) + index * (a.dtype == Dtype::kFloat32 ? 4 : 2);
}

inline void load_row(const Activations& a, int64_t token, int head, int dim, float* row) {
  const void* from = element(a, token, head);
  const uint16_t* narrow = static_cast<const uint16_t*>(from);
  switch (a.dtype) {
    case Dtype::kFloat32:
      __builtin_memcpy(row, from, 4 * dim);
      break;
    case Dtype::kBFloat16:
      for (int i = 0; i < dim; i++) {
        const uint32_t bits = (uint32_t)narrow[i] << 16;
        __builtin_memcpy(row + i, &bits, 4);
      }
      break;
    case Dtype::kFloat16:
      for (int i = 0; i < dim; i++) row[i] = half_to_float(narrow[i]);
  }
}

inline void save_row(const Activations& a, int64_t token, int head, int dim, const float* row) {
  void* to = element(a, token, head);
  uint16_t* narrow = static_cast<uint16_t*>(to);
  switch (a.dtype) {
    case Dtype::kFloat32:
      __builtin_memcpy(to, row, 4 * dim);
      break;
    case Dtype::kBFloat16:
      for (int i = 0; i < dim; i++) narrow[i] = float_to_bfloat(row[i]);
      break;
    case Dtype::kFloat16:
      for (int i = 0; i < dim; i++) narrow[i] = float_to_half(row[i]);
  }
}

// ---- token scales --------------------------------------------------------------------------

alignas(64) constexpr float kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Scales predicted for some positions: amplitude e^(-decay i) + floor.
inline Floats predicted_scales(const float* numbers, Floats positions) {
  return numbers[0] * power_of_two(-kOctavesPerNat * numbers[1] * positions) + numbers[2];
}

// The same for positions first, first + 1, ...; a flat curve needs no exponential.
inline Floats predicted_scales(const float* numbers, int first) {
  if (numbers[0] == 0.0f) return splat(numbers[2]);
  return predicted_scales(numbers, load(kCount) + (float)first);
}

// Whether predictions from position `first` on are the floor to the last bit.
inline bool prior_has_died(const float* numbers, int first) {
  if (numbers[0] == 0.0f) return true;
  const float left = power_of_two(-kOctavesPerNat * numbers[1] * (float)first);
  return numbers[1] >= 0.0f && __builtin_fabsf(numbers[0]) * left < 0x1p-26f * numbers[2];
}

// The factors that scale codes stand for: 2^((code - 128) * step).
inline Floats scale_factors(Ints codes, float step) {
  return power_of_two(__builtin_convertvector(codes - 128, Floats) * step);
}
