"""Text as tokens: tokenizers, packed datasets of documents, and sequences of one length."""
