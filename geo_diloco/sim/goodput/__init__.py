"""What a way to train is worth on machines that fail: goodput and uptime over months, without a model or a message."""
