// SPDX-License-Identifier: Apache-2.0
//
// Where the codes of 16 tokens by 16 coordinates of one group lie. Included by each variant inside
// its unnamed namespace.
//
// A square unpacks to four vectors of 64 levels. Vector j of keys holds coordinates 4 j ... 4 j + 3
// of each of 16 tokens; vector j of values holds tokens 4 j ... 4 j + 3 of each of 16 coordinates.
// So either way a vector meets the same 4 digits in each of its 16 lanes, and the square 16 digits:
// those of a query at 16 coordinates, or the weights of 16 tokens.

struct Square {
  const uint8_t* low;   // the square's first line of 64 bytes
  int64_t stride;       // to its next line: 4 lines at 8 bits, 2 at 4, 1 at 3
  const uint8_t* high;  // its line of high bits, at 3 bits
  int bit;              // where they start
};

// Tokens 16 half ..., coordinates 16 g ... of a group of 32 tokens.
template <int kBits>
inline Square key_square(GroupCodes codes, int dim, int half, int g) {
  if (kBits == 3)
    return {codes.low + (half * dim + g * 16) * 4, 0,
            codes.high + (half * ((dim + 31) / 32) + g / 2) * 64, g % 2 * 4};
  return {codes.low + (half * dim + g * 16) * 2 * kBits, 64, nullptr, 0};
}

template <int kBits>
inline Square value_square(GroupCodes codes, int dim, int half, int g) {
  if (kBits == 3)
    return {codes.low + (half * dim + g * 16) * 4, 0, codes.high + g * 64, half * 4};
  return {codes.low + half * dim * 2 * kBits + g * 64, dim * 4, nullptr, 0};
}
