import java.io.IOException;
import java.io.Serializable;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.catalog.*;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.*;
import org.apache.spark.sql.connector.write.*;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.jdk.javaapi.CollectionConverters;

/**
 * A catalogue whose tables take Spark's MERGE, for tests: no format that does is in a registry that
 * they install from, for this Spark.
 *
 * <p>A table is a file of rows in the folder of the option `folder`. A write, by MERGE or otherwise,
 * writes the whole file, and renames it. One query at a time writes a table.
 */
public final class MergingCatalog implements TableCatalog {
  private String name;
  private Path folder;

  /** What a table's file has. */
  record Contents(String schema, HashMap<String, String> properties, ArrayList<UnsafeRow> rows)
      implements Serializable {
    StructType type() {
      return (StructType) DataType.fromJson(schema);
    }
  }

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    this.folder = Path.of(options.get("folder"));
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public String[] defaultNamespace() {
    return new String[] {"default"};
  }

  private Path file(Identifier table) {
    return folder.resolve(String.join(".", table.namespace()) + "." + table.name());
  }

  @Override
  public Identifier[] listTables(String[] namespace) {
    String prefix = String.join(".", namespace) + ".";
    String[] files = folder.toFile().list();
    return java.util.Arrays.stream(files == null ? new String[0] : files)
        .filter(each -> each.startsWith(prefix))
        .map(each -> Identifier.of(namespace, each.substring(prefix.length())))
        .toArray(Identifier[]::new);
  }

  @Override
  public Table loadTable(Identifier table) throws NoSuchTableException {
    if (!Files.exists(file(table))) {
      throw new NoSuchTableException(table);
    }
    return new MergedTable(file(table));
  }

  @Override
  public Table createTable(Identifier table, TableInfo info) {
    var properties = new HashMap<>(info.properties());
    MergedTable.write(file(table), new Contents(info.schema().json(), properties, new ArrayList<>()));
    return new MergedTable(file(table));
  }

  @Override
  public Table alterTable(Identifier table, TableChange... changes) {
    Contents old = MergedTable.read(file(table));
    var all = CollectionConverters.asScala(List.of(changes)).toSeq();
    StructType type = CatalogV2Util.applySchemaChanges(old.type(), all, scala.Option.empty(), "alter");
    var properties = new HashMap<>(CatalogV2Util.applyPropertiesChanges(old.properties(), all));
    if (!type.equals(old.type()) && !old.rows().isEmpty()) {
      throw new UnsupportedOperationException("columns of a table that has rows do not change");
    }
    MergedTable.write(file(table), new Contents(type.json(), properties, old.rows()));
    return new MergedTable(file(table));
  }

  @Override
  public boolean dropTable(Identifier table) {
    return file(table).toFile().delete();
  }

  @Override
  public void renameTable(Identifier from, Identifier to) {
    throw new UnsupportedOperationException("rename");
  }

  /** A table, which is read and written as a whole. */
  static final class MergedTable implements SupportsRead, SupportsWrite, SupportsRowLevelOperations {
    private final Path file;
    private final Contents contents;

    MergedTable(Path file) {
      this.file = file;
      this.contents = read(file);
    }

    static Contents read(Path file) {
      try (var in = new java.io.ObjectInputStream(Files.newInputStream(file))) {
        return (Contents) in.readObject();
      } catch (IOException | ClassNotFoundException error) {
        throw new IllegalStateException(error);
      }
    }

    static void write(Path file, Contents contents) {
      Path part = file.resolveSibling(file.getFileName() + ".part");
      try {
        Files.createDirectories(file.getParent());
        try (var out = new java.io.ObjectOutputStream(Files.newOutputStream(part))) {
          out.writeObject(contents);
        }
        Files.move(part, file, StandardCopyOption.ATOMIC_MOVE);
      } catch (IOException error) {
        throw new IllegalStateException(error);
      }
    }

    @Override
    public String name() {
      return file.getFileName().toString();
    }

    @Override
    public StructType schema() {
      return contents.type();
    }

    @Override
    public Transform[] partitioning() {
      return new Transform[0];
    }

    @Override
    public Map<String, String> properties() {
      return contents.properties();
    }

    @Override
    public Set<TableCapability> capabilities() {
      return Set.of(TableCapability.BATCH_READ, TableCapability.BATCH_WRITE);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return () -> new WholeScan(read(file));
    }

    @Override
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
      return rewriting(info, read(file).rows());
    }

    @Override
    public RowLevelOperationBuilder newRowLevelOperationBuilder(RowLevelOperationInfo info) {
      return () -> new RowLevelOperation() {
        @Override
        public Command command() {
          return info.command();
        }

        @Override
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
          return MergedTable.this.newScanBuilder(options);
        }

        @Override
        public WriteBuilder newWriteBuilder(LogicalWriteInfo write) {
          return rewriting(write, List.of());
        }
      };
    }

    /** A write after which the table has `kept` and what was written. */
    private WriteBuilder rewriting(LogicalWriteInfo info, List<UnsafeRow> kept) {
      StructType type = info.schema();
      BatchWrite rewrite = new BatchWrite() {
        @Override
        public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo physical) {
          return (partition, task) -> new Rows(UnsafeProjection.create(type), new ArrayList<>());
        }

        @Override
        public void commit(WriterCommitMessage[] messages) {
          var rows = new ArrayList<>(kept);
          for (WriterCommitMessage each : messages) {
            rows.addAll(((Written) each).rows());
          }
          Contents now = read(file);
          MergedTable.write(file, new Contents(now.schema(), now.properties(), rows));
        }

        @Override
        public void abort(WriterCommitMessage[] messages) {}
      };
      return new WriteBuilder() {
        @Override
        public Write build() {
          return new Write() {
            @Override
            public BatchWrite toBatch() {
              return rewrite;
            }
          };
        }
      };
    }
  }

  record Written(ArrayList<UnsafeRow> rows) implements WriterCommitMessage {}

  record Rows(UnsafeProjection projection, ArrayList<UnsafeRow> rows)
      implements DataWriter<InternalRow> {
    @Override
    public void write(InternalRow row) {
      rows.add(projection.apply(row).copy());
    }

    @Override
    public WriterCommitMessage commit() {
      return new Written(rows);
    }

    @Override
    public void abort() {}

    @Override
    public void close() {}
  }

  record Part(ArrayList<UnsafeRow> rows) implements InputPartition {}

  /** Reads all columns of all rows, in one partition. */
  record WholeScan(Contents contents) implements Scan, Batch {
    @Override
    public StructType readSchema() {
      return contents.type();
    }

    @Override
    public Batch toBatch() {
      return this;
    }

    @Override
    public InputPartition[] planInputPartitions() {
      return new InputPartition[] {new Part(contents.rows())};
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new Readers();
    }
  }

  static final class Readers implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition part) {
      Iterator<UnsafeRow> rows = ((Part) part).rows().iterator();
      return new PartitionReader<>() {
        private InternalRow row;

        @Override
        public boolean next() {
          row = rows.hasNext() ? rows.next() : null;
          return row != null;
        }

        @Override
        public InternalRow get() {
          return row;
        }

        @Override
        public void close() {}
      };
    }
  }
}
