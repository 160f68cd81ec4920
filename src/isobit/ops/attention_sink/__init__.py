from isobit.ops.attention_sink.op import attention_sink

__all__ = ["attention_sink"]
