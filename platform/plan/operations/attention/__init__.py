"""Operations of attention: softmax of scores, one fused kernel, keys and values of earlier passes"""
