// Grid: (16 * ROWS rows of the weight, expert; or if LISTED, a pair of a token and an expert).
  __shared__ float4 shared[ROWS * MOST * WARPS * 32];
  __shared__ int own[MAX_LISTED];
  const int column = blockIdx.x * 16 * ROWS, inputs = x_shape[1], outputs = weight_shape[1];
  const int pairs = ONE ? x_shape[0] : experts_shape[0];
  const T* added = BIAS ? bias : nullptr;
  const auto multiply_all = [&](const auto& tokens, int expert, int first, int last) {
    const auto block = [&](auto tiles, int start) {
      product<MODE, BFLOAT, BITS, GROUP, WARPS, ROWS, decltype(tiles)::value>(
          shared, inputs, outputs, x, weight, scales, biases, added, out, tokens, expert, column,
          start, last);
      return start + 8 * decltype(tiles)::value;
    };
    for (int start = first; start < last;) {
      const int left = last - start;
      if (left <= 8) start = block(Constant<1>{}, start);
      else if (left <= 16 || MOST == 2) start = block(Constant<2>{}, start);
      else start = block(Constant<MOST>{}, start);
    }
  };
  const int y = blockIdx.y;
  if constexpr (LISTED) {
    const int count = Listed::list(own, experts, pairs, y);
    multiply_all(Listed{own, pairs / x_shape[0]}, experts[y], 0, count);
  } else if constexpr (ONE) {
    multiply_all(Sorted{}, 0, 0, pairs);
  } else {
    multiply_all(
        Sorted{}, y, first_from(experts, pairs, y), first_from(experts, pairs, y + 1));
  }
