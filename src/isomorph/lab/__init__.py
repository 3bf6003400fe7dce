"""What trains, evaluates and reports; nobody needs it to change a model."""
