// SPDX-License-Identifier: Apache-2.0
//
// Store: one kv head's keys and values of some tokens, from activations to bytes. Included by each
// variant inside its unnamed namespace, after lanes.h and encode.h.
//
// The cost is the two dim x dim products per token and encoding (encode.h); the bytes written are
// a small share of those read.

// ---- bytes ---------------------------------------------------------------------------------

// Bits from ... from + width - 1 of a key's codes into the plane whose token starts at `plane`: a
// byte gathers 8 / width coordinates, 4 apart.
inline void write_key_plane(uint8_t* plane, const uint8_t* codes, int dim, int from, int width) {
  const int span = 4 * (8 / width), mask = (1 << width) - 1;
  for (int d = 0; d < dim; d += span, plane += 64)
    for (int i = 0; i < 4; i++) {
      int byte = 0;
      for (int j = 0; j < 8 / width && d + 4 * j < dim; j++)
        byte |= ((codes[d + 4 * j + i] >> from) & mask) << (width * j);
      plane[i] = (uint8_t)byte;
    }
}

inline void write_key(uint8_t* keys, const Layout& at, int token, const uint8_t* codes) {
  const int dim = at.dim, rest = token % 16 * 4;
  const int64_t chunk = token / 16;
  if (at.key_bits == 3) {
    uint8_t* high = keys + (int64_t)at.block_tokens * dim / 4;
    write_key_plane(keys + chunk * dim * 4 + rest, codes, dim, 0, 2);
    write_key_plane(high + chunk * 64 * ((dim + 31) / 32) + rest, codes, dim, 2, 1);
  } else {
    write_key_plane(keys + chunk * dim * 2 * at.key_bits + rest, codes, dim, 0, at.key_bits);
  }
}

// A byte gathers 8 / width tokens, 4 apart; the other tokens' bits stay.
inline void write_value_plane(uint8_t* plane, const uint8_t* codes, int dim, int token, int from,
                              int width) {
  const int per_byte = 8 / width, shift = width * (token / 4 % per_byte);
  const int mask = (1 << width) - 1;
  plane += (int64_t)(token / (4 * per_byte)) * dim * 4 + token % 4;
  for (int d = 0; d < dim; d++, plane += 4)
    *plane = (uint8_t)((*plane & ~(mask << shift)) | ((codes[d] >> from) & mask) << shift);
}

inline void write_value(uint8_t* values, const Layout& at, int token, const uint8_t* codes) {
  if (at.value_bits == 3) {
    uint8_t* high = values + (int64_t)at.block_tokens * at.dim / 4;
    write_value_plane(values, codes, at.dim, token, 0, 2);
    write_value_plane(high, codes, at.dim, token, 2, 1);
  } else {
    write_value_plane(values, codes, at.dim, token, 0, at.value_bits);
  }
}

inline void write_exact(uint8_t* slot, const float* z, int dim) {
  for (int d = 0; d < dim; d++) {
    const float x = z[d] > 65504.0f ? 65504.0f : z[d] < -65504.0f ? -65504.0f : z[d];
    const uint16_t half = float_to_half(x);
    __builtin_memcpy(slot + 2 * d, &half, 2);
  }
}

// ---- the kernel ------------------------------------------------------------------------------

// Takes the key bias at `position` out of a key.
inline void subtract_waves(const Waves& waves, int head, int position, float* row) {
  for (int j = 0; j < waves.count; j++) {
    const float height = *waves.at(j, position);
    const float* shape = waves.shape(head, j);
    for (int d = 0; d < waves.dim; d++) row[d] -= height * shape[d];
  }
}

// Loads `count` rows of one head, less bias and `center` where given, and turns them by `matrix`.
inline void transform(const Activations& from, const int32_t* tokens, int count, int head,
                      const Waves* waves, const int* positions, const float* center,
                      const float* matrix, int dim, float* raw, float* z) {
  for (int r = 0; r < count; r++) {
    float* row = raw + r * dim;
    load_row(from, tokens[r], head, dim, row);
    if (waves) subtract_waves(*waves, head, positions[r], row);
    if (center)
      for (int d = 0; d < dim; d++) row[d] -= center[d];
  }
  multiply(raw, count, matrix, dim, z);
  for (int i = 0; i < count * dim; i += kLanes) {
    const Ints bits = as_ints(load(z + i));
    save(z + i, as_floats((bits & 0x7f800000) == 0x7f800000 ? Ints{} : bits));
  }
}

inline Codec codec(int bits, int dim, const float* numbers, float step, const int8_t* levels,
                   const Matrices& feedback, int head) {
  Codec c{bits, dim, numbers, step, nullptr, nullptr};
  if (bits == 8) return c;
  c.levels = levels + ((size_t)head * (dim / kLevelGroup) << bits);
  c.feedback = feedback.at(head);
  return c;
}

inline void store_tokens(const StoreArgs& args, int head, const int32_t* tokens, int count,
                         Scratch& scratch) {
  const Constants& c = args.constants;
  const Layout& at = args.cache.layout;
  const int dim = c.dim;
  const float* numbers = c.tdsf + 6 * head;
  const Codec key = codec(at.key_bits, dim, numbers, c.key_step, c.key_levels, c.key_feedback,
                          head);
  const Codec value = codec(at.value_bits, dim, numbers + 3, c.value_step, c.value_levels,
                            c.value_feedback, head);
  float *raw = scratch.rows, *z = scratch.rows + kTileRows * kMaxDim;
  uint8_t codes[kTileRows * kMaxDim], scales[kTileRows];
  int positions[kTileRows];
  for (int start = 0; start < count; start += kTileRows) {
    const int rows = count - start < kTileRows ? count - start : kTileRows;
    for (int which = 0; which < 2; which++) {
      const bool is_key = which == 0;
      for (int r = 0; r < rows; r++) positions[r] = (int)args.positions[tokens[start + r]];
      transform(is_key ? args.key : args.value, tokens + start, rows, head,
                is_key ? &c.waves : nullptr, positions,
                is_key ? c.key_center + (int64_t)head * dim : nullptr,
                (is_key ? c.key_in : c.value_in).at(head), dim, raw, z);
      encode(is_key ? key : value, z, positions, rows, codes, scales);
      for (int r = 0; r < rows; r++) {
        const int64_t slot = args.slots[tokens[start + r]];
        const int offset = (int)(slot % at.block_tokens);
        uint8_t* region = args.cache.region(slot / at.block_tokens, head);
        if (is_key)
          write_key(region + at.keys, at, offset, codes + r * dim);
        else
          write_value(region + at.values, at, offset, codes + r * dim);
        region[(is_key ? at.key_scales : at.value_scales) + offset] = scales[r];
        if (positions[r] == 0) write_exact(region + (is_key ? 0 : 2 * dim), z + r * dim, dim);
      }
    }
  }
}
