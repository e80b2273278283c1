"""Writes every golden file: look at the difference before you commit it."""

from tests.golden import FOLDER, texts

for old in FOLDER.glob("*.sbatch"):
    old.unlink()
for path, text in texts():
    path.write_text(text)
    print(path)
