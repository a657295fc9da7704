"""One click command per question, each in a module of its own name; loaded when asked for. No mathematics here."""
