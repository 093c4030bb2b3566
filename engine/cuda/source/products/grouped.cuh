// Grid: (16 * ROWS rows of the weight, expert; or if LISTED, a pair of a token and an expert).
  __shared__ float4 shared[ROWS * MOST * WARPS * 32];
  __shared__ int own[MAX_LISTED];
  const Product<MODE, BFLOAT, BITS, GROUP, WARPS, ROWS, T, typename Scale<MODE, T>::Type> product{
      (int)x_shape[1], (int)weight_shape[1], x, weight, scales, biases, BIAS ? bias : nullptr, out};
  const int column = blockIdx.x * 16 * ROWS, y = blockIdx.y;
  // An array of one number names no rows.
  const Sorted sorted{read_shape[0] > 1 ? read : nullptr, written_shape[0] > 1 ? written : nullptr};
  const int pairs = ONE ? x_shape[0] : experts_shape[0];
  if constexpr (LISTED) {
    const int count = Listed::list(own, experts, pairs, y);
    const Listed tokens{own, pairs / (int)x_shape[0]};
    product.template write_all<MOST>(shared, tokens, experts[y], column, 0, count);
  } else if constexpr (ONE) {
    product.template write_all<MOST>(shared, sorted, 0, column, 0, pairs);
  } else {
    const int first = first_from(experts, pairs, y), last = first_from(experts, pairs, y + 1);
    product.template write_all<MOST>(shared, sorted, y, column, first, last);
  }
