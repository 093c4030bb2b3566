// Grid: (16 * ROWS rows of the weight, expert).
  alignas(16) __shared__ float shared[WARPS * 32 * 4];
  const int expert = blockIdx.y, column = blockIdx.x * 16 * ROWS, tokens = x_shape[0];
  const int inputs = x_shape[1], outputs = weight_shape[1];
  int first = 0, last = tokens;
  if (!ONE) {
    first = first_from(experts, tokens, expert);
    last = first_from(experts, tokens, expert + 1);
  }
  const T* added = BIAS ? bias : nullptr;
  const auto block = [&](auto tiles, int start) {
    product<MODE, BFLOAT, BITS, GROUP, WARPS, ROWS, decltype(tiles)::value>(
        shared, inputs, outputs, x, weight, scales, biases, added, out, expert, column, start,
        last);
    return start + 8 * decltype(tiles)::value;
  };
  for (int start = first; start < last;) {
    const int left = last - start;
    if (left <= 8) start = block(Constant<1>{}, start);
    else if (left <= 16) start = block(Constant<2>{}, start);
    else if (left <= 32) start = block(Constant<4>{}, start);
    else start = block(Constant<8>{}, start);
  }
