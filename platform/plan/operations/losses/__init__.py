"""Operations that end the forward pass: losses of labels and of targets"""
