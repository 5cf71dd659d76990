// SPDX-License-Identifier: Apache-2.0
//
// From transformed vectors to codes and scale bytes; docs/format.md gives the recipe. Included by
// each variant inside its unnamed namespace, after lanes.h.
//
// Lanes are vectors of different tokens: rounding in turn is serial in the coordinates, tokens are
// independent. Every lane does the same arithmetic whatever lies beside it, so a token's bytes do
// not depend on its neighbours, nor on how wide the lanes are.
//
// Cost of a vector at 3 or 4 bits: five chains of dim^2 / 2 multiply-subtracts, read from one row
// of the feedback, and `bits` compares a coordinate and candidate. Uncalibrated, the quadratic part
// falls away.

// A head's side of the cache (keys or values) and what encoding it takes.
struct Codec {
  int bits, dim;
  const float* numbers;   // amplitude, decay, floor of the predicted scale
  float step;             // octaves per scale code; 0: the predicted scale is the scale
  const int8_t* levels;   // [dim / 16, 2^bits]; unused at 8 bits
  const float* feedback;  // [dim, dim], upper triangular, row after row; null for the identity
};

// Standard deviation of N(0, 1) in units of the Lloyd-Max tables, whose outermost level is 127.
inline float unit_rms(int bits) { return bits == 4 ? 46.476061f : 59.016359f; }

// kLanes vectors, coordinate by coordinate.
struct Lanes {
  Floats at[kMaxDim];
};

struct LaneCodes {
  uint8_t at[kMaxDim][kLanes];
};

inline uint8_t to_scale_byte(double code) {
  return code < 0 ? 0 : code > 255 ? 255 : (uint8_t)code;
}

// Where a scale lies in steps of the code, not rounded; far below every code where it is zero.
inline double scale_steps(float scale, float predicted, float step) {
  if (step == 0.0f) return 128;
  const double ratio = (double)scale / predicted;
  return ratio > 0 ? __builtin_log2(ratio) / step + 128 : -1e30;
}

constexpr double kCandidates[] = {-0.25, 0.0, 0.25, 0.5};  // octaves
constexpr int kTried = 4;
constexpr int kChains = kTried + 1;  // the last is not rounded
constexpr int kAtOnce = kLanes > 8 ? 4 : 2;  // coordinates; their chains fill the registers

// What rounding in turn leaves, for every candidate.
struct Rounded {
  Floats errors[kMaxDim][kChains];
  uint8_t codes[kTried][kMaxDim][kLanes];
  Floats left[kTried];         // squared error, in units of the candidate's scale
  Floats with_levels[kTried];  // product of the vector and its levels, in the metric
  Floats with_itself;          // of the vector with itself
};

// The levels of one coordinate, and a search tree of the edges between them.
struct Ladder {
  float levels[16] = {};
  float tree[4][16] = {};  // by step, and by the bits that the steps before it found
  int bits;

  Ladder(const int8_t* table, int bits) : bits(bits) {
    for (int i = 0; i < 1 << bits; i++) levels[i] = table[i];
    for (int step = 0; step < bits; step++)
      for (int path = 0; path < 1 << step; path++) {
        const int above = (2 * path + 1) << (bits - 1 - step);
        tree[step][path] = 0.5f * (levels[above - 1] + levels[above]);
      }
  }

  // The level nearest to y; of two as near, the higher.
  Ints code(Floats y) const {
    Ints code = -(y >= tree[0][0]);
    code = code + code - (y >= look_up_8(tree[1], code));
    code = code + code - (y >= look_up_8(tree[2], code));
    return bits == 3 ? code : code + code - (y >= look_up_8(tree[3], code));
  }
};

// Rounds z / scale in turn: each coordinate takes up what the errors of those before it leave.
//
// With F the feedback, its unit upper triangle F1 and its diagonal w: the errors e of levels l solve
// F1' e = z / scale - l, and the squared error in the metric is the sum of w e^2. The last chain
// solves F1' p = z, so that p and e give the metric's other products without another matrix.
inline void round_in_turn(const Codec& codec, const Lanes& z, const Floats* scales, Rounded& r) {
  const int dim = codec.dim;
  Floats inverse[kTried];
  for (int c = 0; c < kTried; c++) {
    inverse[c] = 1.0f / scales[c];
    r.left[c] = r.with_levels[c] = Floats{};
  }
  r.with_itself = Floats{};
  for (int group = 0; group < dim; group += kLevelGroup) {
    const Ladder ladder(codec.levels + ((size_t)(group / kLevelGroup) << codec.bits), codec.bits);
    for (int first = group; first < group + kLevelGroup; first += kAtOnce) {
      Floats y[kAtOnce][kChains];
      for (int k = 0; k < kAtOnce; k++) {
        for (int c = 0; c < kTried; c++) y[k][c] = z.at[first + k] * inverse[c];
        y[k][kTried] = z.at[first + k];
      }
      if (codec.feedback)
        for (int d = 0; d < first; d++) {
          const float* row = codec.feedback + (size_t)d * dim + first;
          for (int k = 0; k < kAtOnce; k++)
            for (int c = 0; c < kChains; c++) y[k][c] -= row[k] * r.errors[d][c];
        }
      for (int k = 0; k < kAtOnce; k++) {
        const float* row = codec.feedback ? codec.feedback + (size_t)(first + k) * dim + first : nullptr;
        const float weight = row ? row[k] : 1.0f;
        const Floats p = y[k][kTried];
        r.with_itself += weight * (p * p);
        for (int c = 0; c < kTried; c++) {
          const Ints code = ladder.code(y[k][c]);
          narrow(code, r.codes[c][first + k]);
          const Floats error = y[k][c] - look_up(ladder.levels, code);
          r.left[c] += weight * (error * error);
          r.with_levels[c] += weight * (p * (p * inverse[c] - error));
          y[k][c] = error;
        }
        for (int c = 0; c < kChains; c++) r.errors[first + k][c] = y[k][c];
        if (row)
          for (int later = k + 1; later < kAtOnce; later++)
            for (int c = 0; c < kChains; c++) y[later][c] -= row[later] * y[k][c];
      }
    }
  }
}

inline void encode_rounded(const Codec& codec, const Lanes& z, Floats predicted,
                           LaneCodes& codes, uint8_t* scale_bytes) {
  const int dim = codec.dim;
  Floats energy{};
  for (int d = 0; d < dim; d++) energy += z.at[d] * z.at[d];
  double steps[kLanes];
  for (int i = 0; i < kLanes; i++)
    steps[i] = scale_steps(__builtin_sqrtf(energy[i] / dim) / unit_rms(codec.bits), predicted[i],
                           codec.step);
  Floats scales[kTried];
  for (int c = 0; c < kTried; c++) {
    const double shift = codec.step > 0.0f ? kCandidates[c] / codec.step : 0.0;
    Ints code{};
    for (int i = 0; i < kLanes; i++) code[i] = to_scale_byte(__builtin_nearbyint(steps[i] + shift));
    scales[c] = predicted * scale_factors(code, codec.step);
  }
  Rounded rounded;
  round_in_turn(codec, z, scales, rounded);
  Bytes taken[kTried] = {};  // all ones where a lane takes the candidate
  for (int i = 0; i < kLanes; i++) {
    int best = 0;
    float least = __builtin_inff();
    for (int c = 0; c < kTried; c++) {
      const float error = rounded.left[c][i] * (scales[c][i] * scales[c][i]);
      if (error < least) best = c, least = error;
    }
    taken[best][i] = 255;
    // The scale that leaves the vector's product with itself, in the metric, unbiased.
    const float scale = scales[best][i], product = rounded.with_levels[best][i];
    const float unbiased = product > 0.0f ? rounded.with_itself[i] / product : 0.0f;
    const bool sane = unbiased > scale / 2 && unbiased < scale * 2;
    scale_bytes[i] = to_scale_byte(
        __builtin_nearbyint(scale_steps(sane ? unbiased : scale, predicted[i], codec.step)));
  }
  for (int d = 0; d < dim; d++) {
    Bytes chosen{};
    for (int c = 0; c < kTried; c++) {
      Bytes tried;
      __builtin_memcpy(&tried, rounded.codes[c][d], sizeof tried);
      chosen |= tried & taken[c];
    }
    __builtin_memcpy(codes.at[d], &chosen, sizeof chosen);
  }
}

// 8 bits: the largest coordinate takes level 127 and nothing clips.
inline void encode_bytes(const Codec& codec, const Lanes& z, Floats predicted,
                         LaneCodes& codes, uint8_t* scale_bytes) {
  Floats most{};
  for (int d = 0; d < codec.dim; d++) most = larger(magnitude(z.at[d]), most);
  Ints code{};
  for (int i = 0; i < kLanes; i++)
    code[i] = scale_bytes[i] = to_scale_byte(
        __builtin_ceil(scale_steps(most[i] / 127.0f, predicted[i], codec.step) - 1e-6));
  const Floats inverse = 1.0f / (predicted * scale_factors(code, codec.step));
  for (int d = 0; d < codec.dim; d++) {
    Floats y = nearest(larger(z.at[d] * inverse, splat(-127.0f)));
    y = y < 127.0f ? y : splat(127.0f);
    narrow(__builtin_convertvector(y, Ints) + 128, codes.at[d]);
  }
}

// Encodes `rows` transformed vectors z [rows, dim], finite, at `positions` of their sequences, into
// codes [rows, dim] and scale bytes [rows].
inline void encode(const Codec& codec, const float* z, const int* positions, int rows,
                   uint8_t* codes, uint8_t* scales) {
  const int dim = codec.dim;
  Lanes lanes;
  LaneCodes lane_codes;
  for (int first = 0; first < rows; first += kLanes) {
    const int count = rows - first < kLanes ? rows - first : kLanes;
    Floats at{};
    uint8_t lane_scales[kLanes];
    for (int i = 0; i < kLanes; i++) {
      const int row = first + (i < count ? i : 0);  // idle lanes repeat a row
      at[i] = (float)positions[row];
      for (int d = 0; d < dim; d++) lanes.at[d][i] = z[(size_t)row * dim + d];
    }
    const Floats predicted = predicted_scales(codec.numbers, at);
    if (codec.bits == 8)
      encode_bytes(codec, lanes, predicted, lane_codes, lane_scales);
    else
      encode_rounded(codec, lanes, predicted, lane_codes, lane_scales);
    for (int i = 0; i < count; i++) {
      scales[first + i] = lane_scales[i];
      for (int d = 0; d < dim; d++) codes[(size_t)(first + i) * dim + d] = lane_codes.at[d][i];
    }
  }
}
