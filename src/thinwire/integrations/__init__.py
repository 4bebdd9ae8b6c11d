"""Trainers of other libraries as workers; each module here needs the library it is named after."""
