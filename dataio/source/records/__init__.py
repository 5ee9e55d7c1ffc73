"""Files of records that other libraries write: MDS, LitData, TFRecord, JSON lines, Megatron."""
