from training import corpus, tiny

__all__ = ["corpus", "tiny"]
