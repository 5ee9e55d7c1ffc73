"""Samples in columns: Parquet, Arrow, Hugging Face datasets."""
