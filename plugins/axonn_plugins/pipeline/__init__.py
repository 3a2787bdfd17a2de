"""The message-driven pipeline (dissertation chapter 3): schedule, transport, events; DeepSpeed's engine is in `axonn_plugins.hosts.deepspeed`."""
