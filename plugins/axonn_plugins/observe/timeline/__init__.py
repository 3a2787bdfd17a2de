"""Every millisecond of a training step: `record` watches a rank, `account` says where its time went, `report` shows it, `steps` picks the step."""
