"""Operations with a plain-torch reference and, where there is one, a Triton twin of the same signature."""
