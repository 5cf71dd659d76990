// SPDX-License-Identifier: Apache-2.0
//
// Attention of one tile of query rows over the stored codes, piece by piece.
// Included by each variant inside its unnamed namespace, after lanes.h, squares.h, blocks.h and its
// products:
//
//   from_bytes, to_bytes   kLanes bytes <-> 32-bit integers
//   key_scores<bits>       codes and scales of 32 tokens, queries -> scores
//   add_values<bits>       codes and weights of 32 tokens -> added to acc
//
// A pass over a piece of kPiece tokens: (1) scores of all its tokens, from the key codes;
// (2) per row: maximum, exponentials, their sum, and the weights p * value scale as integers;
// (3) the weighted values, from the value codes. One maximum per piece means no rescaling inside.
// Scores are exponents of 2: log2(e) is a factor of the query's scale. The tile of a decode step is
// one token's heads, that of prefill up to kTileRows rows: the same arithmetic.
//
// Queries take one digit of 7 bits (-63 ... 63), weights one of 0 ... 127, so that a pair of
// products with a level fits the signed 16 bits of AVX2's multiply-add. The 8 digits that meet in
// one 16-bit lane of a square (squares.h) add up to 255 at most: their sum with any levels fits too,
// and AVX2 widens once per square. The unit of the integers, per query row, and per row and group
// of 32 tokens for the weights, is the least that grants both. Flat weights then take 6 bits, each
// as exact for its size as those under a peak. (With one unit for a whole piece, a long flat tail
// under a single peak would round to nothing.) With 8-bit codes both take a second digit (to 1 in
// 4,063 and 1 in 4,095), or their rounding would exceed the codes'.

inline GroupCodes key_codes(const uint8_t* region, const Layout& at, int offset) {
  const uint8_t* p = region + at.keys;
  if (at.key_bits != 3) return {p + (int64_t)offset * at.dim * at.key_bits / 8, nullptr};
  return {p + (int64_t)offset * at.dim / 4,
          p + (int64_t)at.block_tokens * at.dim / 4 + (int64_t)offset * 4 * ((at.dim + 31) / 32)};
}

inline GroupCodes value_codes(const uint8_t* region, const Layout& at, int offset) {
  const uint8_t* p = region + at.values;
  if (at.value_bits != 3) return {p + (int64_t)offset * at.dim * at.value_bits / 8, nullptr};
  return {p + (int64_t)offset * at.dim / 4,
          p + ((int64_t)at.block_tokens + offset / 2) * at.dim / 4};
}

// ---- integers --------------------------------------------------------------------------------

// For 16 numbers that are not negative: sums over those of a square's even and of its odd pairs,
// {0, 1, 4, 5, ...} and {2, 3, 6, 7, ...}, repeated over the lanes.
inline Floats lane_sums(const float* a) {
  Strands s;
  for (int k = 0; k < kPerFold; k++) s.v[k] = load(a + k * kLanes);
  for (int width = kPerFold / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) s.v[i] += s.v[i + width];
  Floats v = s.v[0];
  if constexpr (kLanes > 8) v += partner<8>(v);
  if constexpr (kLanes > 4) v += partner<4>(v);
  return v + partner<1>(v);
}

// What 16 m numbers, not negative, must be divided by so that each is at most `top` and every lane
// sum at most kLaneSum * digit; times the latter.
inline float integer_bound(const float* a, int n, float top, float digit) {
  Strands most{};
  Floats sums{};
  for (int i = 0; i < n; i += kStrided) {
    for (int k = 0; k < kPerFold; k++) most.v[k] = larger(load(a + i + k * kLanes), most.v[k]);
    sums = larger(lane_sums(a + i), sums);
  }
  for (int k = 0; k < kPerFold; k++) most.v[k] = larger(most.v[k] * (kLaneSum * digit / top), sums);
  return fold_max(most);
}

// ---- queries ---------------------------------------------------------------------------------

// Row r of z as integers in units of its own.
inline void quantise_query(const QueryRows& q, int r, int dim, int digits) {
  const float* z = q.z + r * dim;
  QueryDigits& to = q.digits[r];
  const int top = digits == 1 ? kQueryDigit - 1 : (kQueryDigit - 1) * kQueryDigit + 31;
  float size[kMaxDim];
  for (int d = 0; d < dim; d += kLanes) save(size + d, magnitude(load(z + d)));
  const float digit = digits == 1 ? 1.0f : kQueryDigit, steps = kLaneSum * digit;
  const float bound = integer_bound(size, dim, (float)top, digit);
  const float inverse = bound > 1e-30f ? steps / bound : 0.0f;
  q.unit[r] = bound > 1e-30f ? bound / steps : 0.0f;
  int32_t sum = 0;
  for (int d = 0; d < dim; d += kLevelGroup) {
    uint32_t pairs[2][2] = {};  // [digit][even or odd pairs]
    for (int i = 0; i < kLevelGroup; i += kLanes) {
      const Ints x = __builtin_convertvector(nearest(load(z + d + i) * inverse), Ints);
      for (int k = 0; k < kLanes; k++) {
        const int at = d + i + k, pair = at / 2 % 2;
        const int h = digits == 1 ? x[k] : (x[k] + kQueryDigit / 2) >> 6;
        const int low = digits == 1 ? 0 : x[k] - h * kQueryDigit;
        to.at[0][at] = (int8_t)h;
        to.at[1][at] = (int8_t)low;
        pairs[0][pair] += (uint32_t)h;
        pairs[1][pair] += (uint32_t)low;
        sum += x[k];
      }
    }
    for (int digit = 0; digit < 2; digit++)
      to.lane_offsets[digit][d / kLevelGroup] = (int32_t)(
          (pairs[digit][1] * (uint32_t)-128 << 16) | (pairs[digit][0] * (uint32_t)-128 & 0xffff));
  }
  q.offsets[r] = 128 * sum;
}

inline void load_queries(const AttendArgs& args, const Tile* tiles, int count, const QueryRows& q,
                         Scratch& scratch) {
  const Constants& c = args.constants;
  const int dim = c.dim, head = tiles[0].head, digits = args.cache.layout.key_bits == 8 ? 2 : 1;
  const float scale = args.scale * kOctavesPerNat;
  float* raw = scratch.rows;
  int rows = 0;
  for (int i = 0; i < count; i++)
    for (int r = 0; r < tiles[i].rows(args.group); r++, rows++) {
      float* row = raw + rows * dim;
      load_row(args.query, tiles[i].first_token + r / args.group, head * args.group + r % args.group,
               dim, row);
      q.invalid[rows] = !all_finite(row, dim);
      if (q.invalid[rows]) __builtin_memset(row, 0, 4 * dim);
      q.bias[rows] = scale * dot(row, c.key_center + (int64_t)head * dim, dim);
      for (int j = 0; j < c.waves.count; j++)
        q.waves[rows * dim + j] = scale * dot(row, c.waves.shape(head, j), dim);
    }
  multiply(raw, rows, c.query_in.at(head), dim, q.z);
  for (int i = 0; i < rows * dim; i += kLanes) save(q.z + i, load(q.z + i) * scale);
  for (int r = 0; r < rows; r++) quantise_query(q, r, dim, digits);
}

// ---- softmax of a row over one piece ---------------------------------------------------------

struct Span {
  int first, last;  // offsets in the piece
};

// score -> softcap * tanh(score / softcap), the key centre's part added back first. In octaves.
inline void cap_scores(float* scores, Span span, float bias, float softcap) {
  for (int t = span.first; t < span.last; t += kLanes) {
    Floats s = load(scores + t) + bias;
    if (softcap > 0.0f) {
      Floats x = s * (2.0f * kOctavesPerNat / softcap);
      x = x < 120.0f ? x : splat(120.0f);
      s = softcap * (1.0f - 2.0f / (power_of_two(x) + 1.0f));
    }
    save(scores + t, s);
  }
}

struct RowSums {
  float max, sum, exact;  // exact: probability of the sequence's first token
};

// Scores of the visible tokens become weights p * value scale; those of the groups around them zero.
// `bounds` gets each group's integer_bound.
template <int kDigits>
inline RowSums softmax_row(float* scores, Span visible, Span span, const float* value_scales,
                           bool first_is_exact, float* bounds) {
  constexpr float kDigit = kDigits == 1 ? 1 : kWeightDigit, kTop = 127 * kDigit + kDigit - 1;
  for (int t = span.first; t < visible.first; t++) scores[t] = -__builtin_inff();
  for (int t = visible.last; t < span.last; t++) scores[t] = -__builtin_inff();
  Strands most, sum{};
  for (int k = 0; k < kPerFold; k++) most.v[k] = splat(-__builtin_inff());
  for (int t = span.first; t < span.last; t += kStrided)
    for (int k = 0; k < kPerFold; k++)
      most.v[k] = larger(load(scores + t + k * kLanes), most.v[k]);
  const float max = fold_max(most);
  const float exact = first_is_exact ? power_of_two(scores[0] - max) : 0.0f;
  for (int t = span.first; t < span.last; t += kStrided)
    for (int k = 0; k < kPerFold; k++) {
      const int at = t + k * kLanes;
      const Floats p = power_of_two(load(scores + at) - max);
      sum.v[k] += p;
      save(scores + at, p * load(value_scales + at));
    }
  if (first_is_exact) scores[0] = 0.0f;
  for (int t = span.first; t < span.last; t += kGroup)
    bounds[t / kGroup] = integer_bound(scores + t, kGroup, kTop, kDigit);
  return {max, fold_sum(sum), exact};
}

// Weights of a row as integers, given the bounds of their groups, which become units. High digits go
// to `digits`, low ones kPiece bytes on.
template <int kDigits>
inline void quantise_weights(const float* weights, Span span, uint8_t* digits, float* bounds) {
  constexpr float kSteps = kLaneSum * (kDigits == 1 ? 1 : kWeightDigit);
  float inverse[kPiece / kGroup];
  for (int g = 0; g < kPiece / kGroup; g += kLanes) {
    const Floats bound = load(bounds + g);
    save(inverse + g, bound > 1e-30f ? kSteps / bound : Floats{});
    save(bounds + g, bound > 1e-30f ? bound * (1 / kSteps) : Floats{});
  }
  for (int t = span.first; t < span.last; t += kLanes) {
    // The integer stands in the low bits of the rounded sum.
    const Ints x = as_ints(load(weights + t) * inverse[t / kGroup] + kRound);
    if (kDigits == 1) {
      to_bytes(digits + t, x);
    } else {
      to_bytes(digits + t, x >> 5 & 127);
      to_bytes(digits + kPiece + t, x & (kWeightDigit - 1));
    }
  }
}

// ---- one piece -------------------------------------------------------------------------------

// The scales of 32 tokens; `flat` where the prior has died.
inline void load_scales(const uint8_t* codes, const float* numbers, float step, int position,
                        bool flat, float* scales) {
  for (int t = 0; t < kGroup; t += kLanes)
    save(scales + t, (flat ? splat(numbers[2]) : predicted_scales(numbers, position + t)) *
                         scale_factors(from_bytes(codes + t), step));
}

// The tokens of a piece that some row of the tile may see, in whole groups.
inline Span piece_span(const AttendArgs& args, const Tile& tile, int begin) {
  int first = begin;
  if (args.window_left >= 0) {
    const int seen = (tile.first_position - args.window_left) / kGroup * kGroup;
    first = seen > first ? seen : first;
  }
  const int end = (tile.last_position() / kGroup + 1) * kGroup;
  return {first - begin, (end < begin + kPiece ? end : begin + kPiece) - begin};
}

inline Span row_span(const AttendArgs& args, int position, int begin, Span span) {
  Span row = span;
  if (args.window_left >= 0 && position - args.window_left - begin > row.first)
    row.first = position - args.window_left - begin;
  if (position + 1 - begin < row.last) row.last = position + 1 - begin;
  return row;
}

struct GroupRef {
  const uint8_t* region;
  int offset;
};

// Where the groups of a piece lie.
struct PieceMap {
  GroupRef groups[kPiece / kGroup];
  const GroupRef& at(int t) const { return groups[t / kGroup]; }
};

inline void locate(const AttendArgs& args, const Tile& tile, int begin, Span span, PieceMap& map) {
  const int tokens = args.cache.layout.block_tokens;
  const int32_t* block = args.block_table + tile.request * args.table_stride;
  int index = (begin + span.first) / tokens, offset = (begin + span.first) % tokens;
  for (int t = span.first; t < span.last; t += kGroup) {
    map.groups[t / kGroup] = {args.cache.region(block[index], tile.head), offset};
    offset += kGroup;
    if (offset == tokens) index++, offset = 0;
  }
}

inline const int8_t* head_levels(const int8_t* tables, int bits, int head, int dim) {
  return bits == 8 ? nullptr : tables + ((int64_t)head * (dim / kLevelGroup) << bits);
}

inline int bytes_a_step(int bits) { return kGroup * kLevelGroup * (bits == 3 ? 2 : bits) / 8; }

inline Ahead keys_ahead(const Layout& at, const GroupRef& group) {
  const GroupCodes codes = key_codes(group.region, at, group.offset);
  __builtin_prefetch(group.region + at.key_scales + group.offset, 0, 2);
  __builtin_prefetch(group.region + at.value_scales + group.offset, 0, 2);
  return {codes.low, codes.high, bytes_a_step(at.key_bits)};
}

inline Ahead values_ahead(const Layout& at, const GroupRef& group) {
  const GroupCodes codes = value_codes(group.region, at, group.offset);
  return {codes.low, codes.high, bytes_a_step(at.value_bits)};
}

// The key bias' part of the scores of 32 tokens, `kRows` rows.
template <int kRows>
inline void add_waves_to(const Waves& waves, const float* heights, int position, float* scores) {
  Floats sum[kRows][kGroup / kLanes] = {};
  for (int j = 0; j < waves.count; j++) {
    const float* wave = waves.at(j, position);
    for (int k = 0; k < kGroup / kLanes; k++) {
      const Floats part = load(wave + k * kLanes);
      for (int r = 0; r < kRows; r++) sum[r][k] += heights[r * waves.dim + j] * part;
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int k = 0; k < kGroup / kLanes; k++) {
      float* to = scores + r * kPiece + k * kLanes;
      save(to, load(to) + sum[r][k]);
    }
}

// The same, every row. A wave serves two or more rows for as long as it is in registers.
inline void add_waves(const Waves& waves, const QueryRows& q, int rows, int position,
                      float* scores) {
  in_blocks<kLanes == 16 ? 6 : 2>(rows, [&](auto count, int r) {
    add_waves_to<count>(waves, q.waves + r * waves.dim, position, scores + r * kPiece);
  });
}

// The same for one row and token.
inline float wave_score(const Waves& waves, const float* heights, int position) {
  float sum = 0.0f;
  for (int j = 0; j < waves.count; j++) sum += heights[j] * *waves.at(j, position);
  return sum;
}

// Blocks lie scattered, so the hardware's own prefetch starts anew at each of them. Scoring a group
// asks for its values, mixing it for the keys of the next piece.
template <int kKeyBits>
inline void score_piece(const AttendArgs& args, const Tile& tile, const QueryRows& q, int begin,
                        Span span, const PieceMap& map, Scratch& scratch) {
  const Constants& c = args.constants;
  const Layout& at = args.cache.layout;
  const float* numbers = c.tdsf + 6 * tile.head;
  const int8_t* levels = head_levels(c.key_levels, kKeyBits, tile.head, c.dim);
  const bool flat_keys = prior_has_died(numbers, begin);
  const bool flat_values = prior_has_died(numbers + 3, begin);
  for (int t = span.first; t < span.last; t += kGroup) {
    const GroupRef& group = map.at(t);  // all first: these chains are long
    load_scales(group.region + at.key_scales + group.offset, numbers, c.key_step, begin + t,
                flat_keys, scratch.scales + t);
    load_scales(group.region + at.value_scales + group.offset, numbers + 3, c.value_step,
                begin + t, flat_values, scratch.scales + kPiece + t);
  }
  for (int t = span.first; t < span.last; t += kGroup) {
    const GroupRef& group = map.at(t);
    key_scores<kKeyBits>(key_codes(group.region, at, group.offset), levels, c.dim, q,
                         tile.rows(args.group), scratch.scales + t,
                         values_ahead(at, group), scratch.scores + t);
    if (c.waves.count > 0)
      add_waves(c.waves, q, tile.rows(args.group), begin + t, scratch.scores + t);
  }
}

template <int kValueBits>
inline void mix_piece(const AttendArgs& args, const Tile& tile, int begin, Span span,
                      const PieceMap& map, Scratch& scratch, float* acc) {
  const Constants& c = args.constants;
  const Layout& at = args.cache.layout;
  const int8_t* levels = head_levels(c.value_levels, kValueBits, tile.head, c.dim);
  const Span next = piece_span(args, tile, begin + kPiece);
  PieceMap following;
  locate(args, tile, begin + kPiece, next, following);
  for (int t = span.first; t < span.last; t += kGroup) {
    const GroupRef& group = map.at(t);
    Ahead ahead{};
    if (t >= next.first && t < next.last) ahead = keys_ahead(at, following.at(t));
    add_values<kValueBits>(value_codes(group.region, at, group.offset), levels, c.dim,
                           scratch.weights + t, scratch.weight_units + t / kGroup,
                           tile.rows(args.group), ahead, acc);
  }
}

template <int kDigits>
inline void weigh_piece(const AttendArgs& args, const Tile& tile, const QueryRows& q, int begin,
                        Span span, const PieceMap& map, Scratch& scratch, const Partial& out) {
  const int dim = args.constants.dim, rows = tile.rows(args.group);
  const float softcap = args.softcap * kOctavesPerNat;
  float exact_key[kMaxDim], exact_value[kMaxDim];
  const bool has_exact = begin + span.first == 0;
  if (has_exact) {
    const uint8_t* slot = map.at(0).region;
    for (int d = 0; d < dim; d++) {
      uint16_t half[2];
      __builtin_memcpy(half, slot + 2 * d, 2);
      __builtin_memcpy(half + 1, slot + 2 * (dim + d), 2);
      exact_key[d] = half_to_float(half[0]);
      exact_value[d] = half_to_float(half[1]);
    }
  }
  for (int r = 0; r < rows; r++) {
    float* scores = scratch.scores + r * kPiece;
    float* acc = out.acc + r * dim;
    float* units = scratch.weight_units + r * (kPiece / kGroup);
    uint8_t* digits = scratch.weights + 2 * r * kPiece;
    const Span visible = row_span(args, tile.first_position + r / args.group, begin, span);
    __builtin_memset(acc, 0, 4 * dim);
    out.max[r] = -__builtin_inff();
    out.sum[r] = 0.0f;
    Span own{span.last, span.last};  // the groups this row weighs
    if (visible.first < visible.last) {
      own = {visible.first / kGroup * kGroup, (visible.last + kGroup - 1) / kGroup * kGroup};
      const bool exact = has_exact && visible.first == 0;
      if (exact)
        scores[0] = dot(q.z + r * dim, exact_key, dim) +
                    wave_score(args.constants.waves, q.waves + r * dim, 0);
      if (args.softcap > 0.0f || args.sinks) cap_scores(scores, own, q.bias[r], softcap);
      const RowSums sums =
          softmax_row<kDigits>(scores, visible, own, scratch.scales + kPiece, exact, units);
      quantise_weights<kDigits>(scores, own, digits, units);
      out.max[r] = sums.max;
      out.sum[r] = sums.sum;
      if (exact)
        for (int d = 0; d < dim; d += kLanes)
          save(acc + d, sums.exact * load(exact_value + d));
    }
    if (own.first == span.first && own.last == span.last) continue;
    for (int t = span.first; t < span.last; t += kGroup)
      if (t < own.first || t >= own.last) {
        units[t / kGroup] = 0.0f;
        __builtin_memset(digits + t, 0, kGroup);
        __builtin_memset(digits + kPiece + t, 0, kGroup);
      }
  }
}

inline void attend_piece(const AttendArgs& args, const Tile& tile, const QueryRows& q, int piece,
                         Scratch& scratch, const Partial& out) {
  const int begin = piece * kPiece;
  const Span span = piece_span(args, tile, begin);
  const Layout& at = args.cache.layout;
  PieceMap map;
  locate(args, tile, begin, span, map);
  switch (at.key_bits) {
    case 3: score_piece<3>(args, tile, q, begin, span, map, scratch); break;
    case 4: score_piece<4>(args, tile, q, begin, span, map, scratch); break;
    default: score_piece<8>(args, tile, q, begin, span, map, scratch);
  }
  if (at.value_bits == 8)
    weigh_piece<2>(args, tile, q, begin, span, map, scratch, out);
  else
    weigh_piece<1>(args, tile, q, begin, span, map, scratch, out);
  switch (at.value_bits) {
    case 3: mix_piece<3>(args, tile, begin, span, map, scratch, out.acc); break;
    case 4: mix_piece<4>(args, tile, begin, span, map, scratch, out.acc); break;
    default: mix_piece<8>(args, tile, begin, span, map, scratch, out.acc);
  }
}

// ---- merging and the end ---------------------------------------------------------------------

inline void merge(const Partial& into, const Partial& next, int rows, int dim) {
  const float none = -__builtin_inff();
  for (int r = 0; r < rows; r++) {
    if (next.max[r] == none) continue;
    const float* from = next.acc + r * dim;
    float* acc = into.acc + r * dim;
    if (into.max[r] == none) {
      into.max[r] = next.max[r];
      into.sum[r] = next.sum[r];
      __builtin_memcpy(acc, from, 4 * dim);
      continue;
    }
    const float max = into.max[r] > next.max[r] ? into.max[r] : next.max[r];
    const float a = power_of_two(into.max[r] - max), b = power_of_two(next.max[r] - max);
    into.max[r] = max;
    into.sum[r] = into.sum[r] * a + next.sum[r] * b;
    for (int d = 0; d < dim; d += kLanes) save(acc + d, load(acc + d) * a + load(from + d) * b);
  }
}

inline void finish(const AttendArgs& args, const Tile* tiles, int count, const QueryRows& q,
                   const Partial& state, Scratch& scratch) {
  const int dim = args.constants.dim, head = tiles[0].head;
  float *z = scratch.rows, *turned = scratch.rows + kTileRows * kMaxDim;
  int rows = 0;
  for (int i = 0; i < count; i++)
    for (int r = 0; r < tiles[i].rows(args.group); r++, rows++) {
      float sum = state.sum[rows], share = 1.0f;
      if (args.sinks) {
        const float sink = args.sinks[head * args.group + r % args.group] * kOctavesPerNat;
        const float max = state.max[rows] > sink ? state.max[rows] : sink;
        share = power_of_two(state.max[rows] - max);
        sum = sum * share + power_of_two(sink - max);
      }
      const float inverse = share / sum;
      for (int d = 0; d < dim; d += kLanes)
        save(z + rows * dim + d, load(state.acc + rows * dim + d) * inverse);
    }
  multiply(z, rows, args.constants.value_out.at(head), dim, turned);
  rows = 0;
  for (int i = 0; i < count; i++)
    for (int r = 0; r < tiles[i].rows(args.group); r++, rows++) {
      float* row = turned + rows * dim;
      if (q.invalid[rows])
        for (int d = 0; d < dim; d++) row[d] = __builtin_nanf("");
      save_row(args.out, tiles[i].first_token + r / args.group, head * args.group + r % args.group,
               dim, row);
    }
}
